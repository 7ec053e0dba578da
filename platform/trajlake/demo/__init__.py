"""The demo's rollouts: environments, agents and worker processes that stream into a lake, and the check afterwards.

`workers.run` starts the processes and kills one; `check.check` compares what `flush()` acknowledged with the
tables. The command `trajlake demo` puts them between `init` and `export`.
"""
