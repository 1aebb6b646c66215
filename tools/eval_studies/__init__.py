"""What `moaspec eval --cost` and `--cut` measure, in a checkout of the repository."""
