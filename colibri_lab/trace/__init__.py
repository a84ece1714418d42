"""Routing traces: record, import, replay, measure."""
