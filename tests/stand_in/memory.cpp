// A stand-in for NVIDIA's CUDA runtime: eight devices whose kernels do nothing.
//
// Memory is reserved and never touched, copies up to SMALL bytes are made at once, streams and
// events keep the host's times.  What runs above it is real: torch's dispatch, its caching and its
// pinned allocator, its streams, ProcessGroupNCCL.  No number that comes out of a kernel means
// anything, and no time does.  The signatures are those of CUDA 13's cuda_runtime_api.h.
#include "stand_in.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t SMALL = 1 << 20;
constexpr int MAX_DEVICES = 64;

int device_count() {
  static const int count = [] {
    const char* said = getenv("STAND_IN_GPUS");
    const int asked = said ? atoi(said) : 8;
    return asked < 0 ? 0 : (asked > MAX_DEVICES ? MAX_DEVICES : asked);
  }();
  return count;
}

size_t device_bytes() {
  static const size_t bytes = [] {
    const char* said = getenv("STAND_IN_GPU_BYTES");
    return said ? strtoull(said, nullptr, 10) : 143771ull << 20;
  }();
  return bytes;
}

struct Block {
  size_t bytes;
  cudaMemoryType type;
  int device;
};

std::mutex guard;
std::map<char*, Block> blocks;  // by first byte
size_t used[MAX_DEVICES];
thread_local int current = 0;

// The block that an address lies in, or nullptr; `guard` is held.
const Block* block_of(const void* pointer) {
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  --after;
  return address < after->first + after->second.bytes ? &after->second : nullptr;
}

cudaError_t reserve(void** out, size_t bytes, cudaMemoryType type, int device) {
  if (bytes == 0) {
    *out = nullptr;
    return cudaSuccess;
  }
  std::lock_guard<std::mutex> hold(guard);
  const size_t rounded = (bytes + 511) / 512 * 512;
  if (type == cudaMemoryTypeDevice && used[device] + rounded > device_bytes())
    return fail(cudaErrorMemoryAllocation);
  void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  blocks[static_cast<char*>(memory)] = {rounded, type, device};
  if (type == cudaMemoryTypeDevice) used[device] += rounded;
  *out = memory;
  return cudaSuccess;
}

cudaError_t release(void* pointer, cudaMemoryType type) {
  if (pointer == nullptr) return cudaSuccess;
  std::lock_guard<std::mutex> hold(guard);
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end() || found->second.type != type) return fail(cudaErrorInvalidValue);
  if (type == cudaMemoryTypeDevice) used[found->second.device] -= found->second.bytes;
  munmap(found->first, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

// Copies are checked to lie in memory that is there; only small ones are made.  A number that the
// host reads is zero: no kernel has written it, and what lies there is of somebody else.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return cudaSuccess;
  {
    std::lock_guard<std::mutex> hold(guard);
    const Block *left = block_of(to), *right = block_of(from);
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (to_device && (!left || left->type != cudaMemoryTypeDevice)) return fail(cudaErrorInvalidValue);
    if (from_device && (!right || right->type != cudaMemoryTypeDevice))
      return fail(cudaErrorInvalidValue);
  }
  if (kind == cudaMemcpyDeviceToHost && bytes <= 8)
    memset(to, 0, bytes);
  else if (bytes <= SMALL)
    memmove(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last = error;
  return error;
}

extern "C" {

// --- devices -----------------------------------------------------------------------------------
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  memset(prop, 0, sizeof *prop);
  snprintf(prop->name, sizeof prop->name, "Stand-in of an NVIDIA H200");
  prop->uuid.bytes[0] = static_cast<char>(device + 1);
  prop->totalGlobalMem = device_bytes();
  prop->sharedMemPerBlock = 49152;
  prop->sharedMemPerBlockOptin = 232448;
  prop->sharedMemPerMultiprocessor = 233472;
  prop->regsPerBlock = 65536;
  prop->regsPerMultiprocessor = 65536;
  prop->warpSize = 32;
  prop->memPitch = 2147483647;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
  prop->maxThreadsDim[2] = 64;
  prop->maxGridSize[0] = 2147483647;
  prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->major = 9;
  prop->minor = 0;
  prop->textureAlignment = 512;
  prop->multiProcessorCount = 132;
  prop->unifiedAddressing = 1;
  prop->memoryBusWidth = 6144;
  prop->l2CacheSize = 62914560;
  prop->maxThreadsPerMultiProcessor = 2048;
  prop->pciBusID = device + 1;
  prop->asyncEngineCount = 3;
  prop->concurrentKernels = 1;
  return cudaSuccess;
}

// --- errors ------------------------------------------------------------------------------------
cudaError_t cudaGetLastError() {
  const cudaError_t was = last;
  last = cudaSuccess;
  return was;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaErrorOfTheStandIn";
}
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  snprintf(text, sizeof text, "error %d of the stand-in", static_cast<int>(error));
  return text;
}

// --- memory ------------------------------------------------------------------------------------
cudaError_t cudaMalloc(void** out, size_t bytes) {
  return reserve(out, bytes, cudaMemoryTypeDevice, current);
}
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
cudaError_t cudaFree(void* pointer) { return release(pointer, cudaMemoryTypeDevice); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return reserve(out, bytes, cudaMemoryTypeHost, current);
}
cudaError_t cudaFreeHost(void* pointer) { return release(pointer, cudaMemoryTypeHost); }
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> hold(guard);
  blocks[static_cast<char*>(pointer)] = {bytes, cudaMemoryTypeHost, current};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> hold(guard);
  return blocks.erase(static_cast<char*>(pointer)) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  std::lock_guard<std::mutex> hold(guard);
  memset(out, 0, sizeof *out);
  const Block* block = block_of(pointer);
  out->type = block ? block->type : cudaMemoryTypeUnregistered;
  out->device = block ? block->device : 0;
  void* address = const_cast<void*>(pointer);
  out->devicePointer = block && block->type == cudaMemoryTypeDevice ? address : nullptr;
  out->hostPointer = block && block->type == cudaMemoryTypeHost ? address : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> hold(guard);
  *total = device_bytes();
  *free_bytes = *total - used[current];
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind,
                              cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (bytes <= SMALL) memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}
cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char somewhere[1 << 16];
  *out = somewhere;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(16);  // nobody looks inside
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, 8);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

}  // extern "C"
