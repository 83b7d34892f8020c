"""Telemetry of messages: log lines, metrics, spans and heartbeats of processes.

Start with `run_log`, which puts the message into every log line. `metrics` exports what `core.telemetry.metrics`
counts. `tracing` makes spans of OpenTelemetry. `heartbeats` shows that a worker or scheduler process is alive.
"""
