// How matrices stand in shared memory, and numbers in registers: plain C++ on top of hopper.cuh.

using u16 = unsigned short;
using i64 = long long;

constexpr int ROW = 128;  // bytes of a row in a panel: 64 values, the width of the hardware's widest swizzle
#define NONE __int_as_float(0xff800000)

#ifndef STAMP
#define STAMP(i)  // a build that measures notes the time here
#endif

// Descriptor of swizzled panels: one group of 8 rows is 1024 bytes from the next. Where the panels' 64 values go along the
// product's inner axis `far` is not read; where along its outer axis, it is the bytes from one panel to the next.
__device__ __forceinline__ u64 panels(u32 at, u32 far = 16) {
    return static_cast<u64>((at & 0x3ffff) >> 4) | (static_cast<u64>(far >> 4) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

// Where 16-byte chunk c of row r stands in panels of `rows` rows.
__device__ __forceinline__ u32 chunk_at(int rows, int r, int c) { return (c >> 3) * rows * ROW + r * ROW + (((c & 7) ^ (r & 7)) << 4); }

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ __forceinline__ float rounded(float v) { return low_of(pack(v, 0.0f)); }

__device__ __forceinline__ float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ float along(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
