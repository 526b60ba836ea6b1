"""The memory study behind `python -m cupaged simulate`: request traces, ways to give them memory, a replay that measures the waste."""
