"""The tool gateway: a process of its own between the policy's calls and everything that they could touch."""
