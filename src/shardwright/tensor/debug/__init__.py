"""Debugging tools: explain the communication of a call, draw a layout."""
