"""Names of the files in a run's folder that are read back, besides `metrics.jsonl`."""

CONFIG_FILE = "config.json"  # the resolved configuration
DEVICE_FILE = "device.json"  # the mesh, and the bytes that one device holds
SAMPLES_FILE = "samples.txt"  # the text that the run drew at its end
