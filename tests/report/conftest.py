from runtime.fixtures import par as par
from runtime.fixtures import x as x
