"""Text generation: prompts, the decoding loop on the devices, sampling, and the text of tokens.

The loop generates several tokens in each call of one compiled function, with a KV cache or by complete forward passes.
Sampling is greedy, or random with temperature, top-k and top-p. All prompts are checked together, and texts contain
only complete characters.
"""
