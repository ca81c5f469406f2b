#pragma once
// Stand-in: ProcessGroupGloo.hpp includes this header and uses nothing of it.
