"""IN WHAT ORDER do stages run? Schedules as tables, their proof and charts, and the executor that runs them."""
