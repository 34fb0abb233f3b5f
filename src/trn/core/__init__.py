"""What every other room of trn agrees on: records, states, names of files, errors. Imports nothing of ours."""
