"""What depends on the kind of device: memory, attention kernels, copies, peak rates."""
