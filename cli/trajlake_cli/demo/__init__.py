"""What `trajlake demo` does: `folder` keeps its place in order, `tour` leads through it, `stage` shows it."""
