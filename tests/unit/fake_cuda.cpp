// Lets autograd of torch's build for CPUs work with tensors of the device "cuda" that have no data. To be loaded before
// torch, by LD_PRELOAD.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
static const bool registered = (c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard), true);
