"""Which tokens come next? Prompts, the decoding loop on the devices, sampling, and the text of tokens.

The loop draws several tokens in each call of one compiled function, with a cache or by whole forward passes. Sampling
is greedy, or random with temperature, top-k and top-p. Prompts are checked all at once; texts end in whole
characters.
"""
