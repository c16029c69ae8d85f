"""Programs that users put our models into, as they are: `make test-clients` installs them and runs these tests."""
