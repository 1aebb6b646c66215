"""Training on one or several processes: DDP, FSDP and DeepSpeed ZeRO."""
