// A stand-in for NCCL: communicators meet (each rank waits until all have come), nothing is sent.
//
// With STAND_IN_LOG set every rank writes down what it asks of which communicator, so that a test
// can hold the ranks' orders against each other.  The signatures are those of NCCL 2's nccl.h.
#include <nccl.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

struct ncclComm {
  int rank, ranks;
  std::string name;
};

namespace {

constexpr int PATIENCE_MS = 60000;

std::string meeting_place() {
  const char* said = getenv("STAND_IN_MEETS");
  return said ? said : "/tmp";
}

ncclResult_t note(ncclComm_t comm, const char* what, size_t count, int type, int peer) {
  static const char* said = getenv("STAND_IN_LOG");
  static FILE* file =
      said ? fopen((std::string(said) + "/" + std::to_string(getpid())).c_str(), "a") : nullptr;
  if (file) {
    fprintf(file, "%s %d %d %s %zu %d %d\n", comm->name.c_str(), comm->rank, comm->ranks, what,
            count, type, peer);
    fflush(file);
  }
  return ncclSuccess;
}

ncclResult_t join(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank) {
  char name[33];
  for (int i = 0; i < 16; i++) snprintf(name + 2 * i, 3, "%02x", id.internal[i] & 255);
  const std::string base = meeting_place() + "/" + name + "-";
  close(open((base + std::to_string(rank)).c_str(), O_CREAT | O_WRONLY, 0600));
  for (int other = 0; other < ranks; other++) {
    struct stat info;
    for (int waited = 0; stat((base + std::to_string(other)).c_str(), &info) != 0; waited++) {
      if (waited > PATIENCE_MS) {
        fprintf(stderr, "stand-in of NCCL: rank %d of %d never came\n", other, ranks);
        return ncclSystemError;
      }
      usleep(1000);
    }
  }
  *out = new ncclComm{rank, ranks, name};
  return note(*out, "init", 0, 0, -1);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  FILE* random = fopen("/dev/urandom", "rb");
  const bool read = fread(id->internal, 1, 16, random) == 16;
  fclose(random);
  return read ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return join(comm, ranks, id, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return join(comm, ranks, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  return join(comm, ranks, ids[0], rank);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return note(comm, "finalize", 0, 0, -1); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return note(comm, "destroy", 0, 0, -1); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return note(comm, "abort", 0, 0, -1); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in of NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

ncclResult_t ncclAllReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t) {
  return note(comm, "all_reduce", count, type, -1);
}
ncclResult_t ncclReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, int root,
                        ncclComm_t comm, cudaStream_t) {
  return note(comm, "reduce", count, type, root);
}
ncclResult_t ncclReduceScatter(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t comm, cudaStream_t) {
  return note(comm, "reduce_scatter", count, type, -1);
}
ncclResult_t ncclAllGather(const void*, void*, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t) {
  return note(comm, "all_gather", count, type, -1);
}
ncclResult_t ncclAlltoAll(const void*, void*, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t) {
  return note(comm, "all_to_all", count, type, -1);
}
ncclResult_t ncclBroadcast(const void*, void*, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t) {
  return note(comm, "broadcast", count, type, root);
}
ncclResult_t ncclBcast(void*, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t) {
  return note(comm, "broadcast", count, type, root);
}
ncclResult_t ncclSend(const void*, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t) {
  return note(comm, "send", count, type, peer);
}
ncclResult_t ncclRecv(void*, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t) {
  return note(comm, "recv", count, type, peer);
}

}  // extern "C"
