"""Where the text of an answer comes from: an engine in this process, or a remote target."""
