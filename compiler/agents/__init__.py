"""Who proposes. Everything here keeps `compiler.bench.Agent`."""
