"""Who runs which stage when: seconds, bubbles and bytes of pipelines."""
