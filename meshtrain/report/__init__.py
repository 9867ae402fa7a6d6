"""HOW DID RUNS GO? One page about their folders: curves, differences, memory, mesh, schedule, samples."""
