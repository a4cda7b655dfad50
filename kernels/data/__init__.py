"""What passes read and write: layout, messages, tables of addresses, hyper-parameters, and state kept between steps."""
