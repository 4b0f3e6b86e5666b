raise SystemExit("STOP: machine time for helpers is over; write your report now from what you have")
