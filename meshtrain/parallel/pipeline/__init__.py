"""Pipeline schedules as data: written (table, generators), proved (validate, buffers), simulated, drawn, executed."""
