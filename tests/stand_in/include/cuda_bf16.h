// nccl.h asks for this header and for nothing in it.
#pragma once
