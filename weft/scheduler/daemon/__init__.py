"""The shell: driver, service, reception, hearing and orders, pool, looks for hangs, service manager."""
