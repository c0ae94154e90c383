"""Pipeline schedules: who runs which stage when, in how many seconds and bytes."""
