"""What a step costs by arithmetic: lower bounds of bytes sent, and the memory of one device."""
