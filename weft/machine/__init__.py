"""What this machine is: cores, GPUs, memory, limits, files, versions; and the workers it is divided into."""
