"""What decides how a call runs: the device, plans, tuned rows, stated costs."""
