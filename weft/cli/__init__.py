"""The command line: verbs that ask the daemon, and screens for people."""
