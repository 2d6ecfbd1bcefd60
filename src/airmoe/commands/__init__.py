"""What `airmoe` can do, a function per command: its signature is the command line.

They import what they need themselves, so that --help is quick.
"""
