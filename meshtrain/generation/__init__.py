"""Which tokens come next: sampling, the loop on the devices, the text that it gives."""
