"""WHERE does each array live? Mesh axes, the table of rules, and the placements that follow from them."""
