"""The door: command line, HTTP interface, and the Serve application."""
