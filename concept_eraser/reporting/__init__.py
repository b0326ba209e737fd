"""Pages and figures about one run or several, made from run folders."""
