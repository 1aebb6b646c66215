"""Commands: `moaspec vllm-config` and `moaspec vllm-check`."""
