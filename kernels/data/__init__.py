"""What passes read and write: blocks, messages, addresses, hyper-parameters and the state between steps."""
