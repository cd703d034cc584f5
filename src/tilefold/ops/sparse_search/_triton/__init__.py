"""MaxSim in Triton: compute capability 8.0 and newer; TMA on 9.0 and newer."""
