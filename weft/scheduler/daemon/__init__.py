"""The shell: driver, service, reception, pool, service manager."""
