"""`moaspec vllm-config`."""
