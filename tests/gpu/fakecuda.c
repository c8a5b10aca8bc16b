// A libcuda.so.1 for machines without a GPU: the driver's entry points that this project uses, on host memory.
//
//   cc -shared -fPIC -O1 -pthread -Wl,-soname,libcuda.so.1 fakecuda.c -ldl -o libcuda.so.1
//
// What it keeps of a real device, because faults hide there:
//   memory    Device addresses are a range that the host may not touch (PROT_NONE); fresh memory is all 0xff, which is NaN; a copy
//             outside a live allocation is an error when it is enqueued, and loses the context when it runs.
//   streams   Lazy by default: work runs when something waits for it and not before, the work of one stream in order. A missing
//             synchronise, event or wait then reads what is not there yet. The legacy stream and blocking streams wait for each other.
//   capture   Work on a capturing stream becomes a node with a copy of its arguments. What a capture forbids is refused (900), and
//             spoils the capture (901), also from another thread in global mode, unless that thread has exchanged its mode.
//   kernels   cuLaunchKernel runs `cuemu_launch_NAME` of an emulator library (FAKE_CUDA_KERNELS, or fakecuda_kernels).
//   faults    Every entry point counts; call n fails before it does anything, or from call n on all do.
//
// Read at cuInit: FAKE_CUDA_DEVICES (1), FAKE_CUDA_LAZY (1), FAKE_CUDA_ARCH (90), FAKE_CUDA_KERNELS. Tests reach the rest through the
// functions named fakecuda_*, at the end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};
enum { MAX_DEVICES = 8, MAX_STREAMS = 4096, MAX_BLOCKS = 65536, MAX_DEPTH = 16, MAX_NAMES = 128 };
enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

#define FIRST_ADDRESS 0x700000000000ull
#define CAPACITY (4ull << 30)

typedef uint64_t Address;

typedef struct { Address base; size_t size; int live; } Block;

typedef struct Function { int (*args)(unsigned *); const char *(*launch)(unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void **); void (*shared)(unsigned); } Function;

typedef enum { COPY, SET, LAUNCH, WAIT } Kind;
typedef struct Op {
    Kind kind;
    struct Op *next;
    uint64_t seq;
    int device;
    // COPY, SET
    Address dst, src;
    int dst_is_host, src_is_host;
    size_t dst_pitch, src_pitch, width, height;
    unsigned char value;
    // LAUNCH
    Function *function;
    unsigned sizes[6], shared;
    void **params;
    // WAIT
    struct Stream *on;
    uint64_t until;
} Op;

typedef struct Capture { Op *head, **tail; int mode, spoiled; pthread_t thread; } Capture;

typedef struct Stream {
    int device, is_blocking;
    uint64_t id, enqueued, done;
    Op *head, **tail;
    Capture *capture;
} Stream;

typedef struct { Stream *stream; uint64_t seq; int live, is_captured; } Event;
typedef struct { Op *head; int num_nodes; } Graph;

typedef struct {
    int retained, sticky;
    Block blocks[MAX_BLOCKS];
    int num_blocks;
    Address top;
    int file;
    char *device_view, *shadow; // the addresses that kernels see, and the same memory for copies
    Stream legacy;
} Device;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Device *devices;
static int num_devices, arch, is_lazy = -1, is_initialized; // is_lazy below 0: nobody has said
static Stream *streams[MAX_STREAMS];
static int num_streams, num_live_events;
static uint64_t next_id = 1;
static Block pinned[MAX_BLOCKS];
static int num_pinned;
static void *kernels;
static char problem_text[4096];
static int num_problems, num_pageable;
static unsigned char last_args[4096];
static size_t last_args_size;

static uint64_t calls, fail_at = UINT64_MAX;
static int fail_code, fail_is_sticky;
static char failed_name[64];
static struct { char name[64]; uint64_t count; } names[MAX_NAMES];

static __thread int stack[MAX_DEPTH], depth; // ordinals of the contexts that this thread has pushed
static __thread int exchange_mode = MODE_GLOBAL;

static void problem(const char *format, ...) {
    size_t used = strlen(problem_text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem_text + used, sizeof problem_text - used, format, arguments);
    va_end(arguments);
    num_problems++;
}

// --- entering a call -------------------------------------------------------------------------------------------------------------

static void unlock(int *held) {
    if (*held) pthread_mutex_unlock(&mutex);
}

static int count(const char *name) {
    for (int i = 0; i < MAX_NAMES; i++) {
        if (!names[i].name[0]) snprintf(names[i].name, sizeof names[i].name, "%s", name);
        if (!strcmp(names[i].name, name)) {
            names[i].count++;
            break;
        }
    }
    uint64_t n = calls++;
    if (n == fail_at || (fail_is_sticky && n > fail_at)) {
        if (n == fail_at) snprintf(failed_name, sizeof failed_name, "%s", name);
        return fail_code;
    }
    return OK;
}

static Device *current(void) {
    return depth && stack[depth - 1] >= 0 ? &devices[stack[depth - 1]] : NULL;
}

// Each entry point begins with one of these. The lock is held to the end of the function.
#define ENTER(name)                                                                                                              \
    int held __attribute__((cleanup(unlock))) = !pthread_mutex_lock(&mutex);                                                     \
    do {                                                                                                                         \
        int injected_ = count(name);                                                                                             \
        if (injected_) return injected_;                                                                                         \
        if (!is_initialized) return NOT_INITIALIZED;                                                                             \
    } while (0)
#define IN_CONTEXT(name)                                                                                                         \
    ENTER(name);                                                                                                                 \
    Device *device = current();                                                                                                  \
    if (!device || !device->retained) return INVALID_CONTEXT;                                                                    \
    if (device->sticky) return device->sticky
// As IN_CONTEXT, for a call that a capture forbids.
#define NOT_IN_CAPTURE(name)                                                                                                     \
    IN_CONTEXT(name);                                                                                                            \
    if (is_forbidden()) return CAPTURE_UNSUPPORTED

static int is_forbidden(void) {
    int forbidden = 0;
    for (int i = 0; i < num_streams; i++) {
        Capture *capture = streams[i]->capture;
        if (!capture || exchange_mode == MODE_RELAXED || capture->mode == MODE_RELAXED) continue;
        if (capture->mode == MODE_GLOBAL || pthread_equal(capture->thread, pthread_self())) {
            capture->spoiled = 1;
            forbidden = 1;
        }
    }
    return forbidden;
}

// --- memory ----------------------------------------------------------------------------------------------------------------------

static Block *find(Block *blocks, int number, Address address, size_t size) {
    for (int i = number - 1; i >= 0; i--) {
        if (address >= blocks[i].base && address - blocks[i].base <= blocks[i].size && size <= blocks[i].size - (address - blocks[i].base))
            return &blocks[i];
    }
    return NULL;
}

static int device_of(Address address) {
    if (address < FIRST_ADDRESS || address >= FIRST_ADDRESS + num_devices * CAPACITY) return -1;
    return (int)((address - FIRST_ADDRESS) / CAPACITY);
}

// The memory behind a live range of device addresses, or NULL.
static char *memory_at(Address address, size_t size) {
    int ordinal = device_of(address);
    Block *block = ordinal < 0 ? NULL : find(devices[ordinal].blocks, devices[ordinal].num_blocks, address, size);
    return block && block->live ? devices[ordinal].shadow + (address - (Address)devices[ordinal].device_view) : NULL;
}

static size_t extent(size_t pitch, size_t width, size_t height) {
    return height ? (height - 1) * pitch + width : 0;
}

static int lose(Op *op, int code, const char *what, Address address) {
    problem("%s at %#llx; ", what, (unsigned long long)address);
    devices[op->device].sticky = code;
    return code;
}

static char *side(Op *op, Address address, int is_host, size_t pitch) {
    if (!is_host) return memory_at(address, extent(pitch, op->width, op->height));
    Block *block = find(pinned, num_pinned, address, 1);
    return block && !block->live ? NULL : (char *)address;
}

static int run_copy(Op *op) {
    char *dst = side(op, op->dst, op->dst_is_host, op->dst_pitch), *src = side(op, op->src, op->src_is_host, op->src_pitch);
    if (!dst) return lose(op, ILLEGAL_ADDRESS, "a copy to memory that was freed", op->dst);
    if (!src) return lose(op, ILLEGAL_ADDRESS, "a copy from memory that was freed", op->src);
    for (size_t row = 0; row < op->height; row++) memmove(dst + row * op->dst_pitch, src + row * op->src_pitch, op->width);
    return OK;
}

static int run_launch(Op *op) {
    for (int i = 0; i < num_devices; i++) mprotect(devices[i].device_view, CAPACITY, PROT_READ | PROT_WRITE);
    if (op->function->shared) op->function->shared(op->shared);
    unsigned *n = op->sizes;
    const char *error = op->function->launch(n[0], n[1], n[2], n[3], n[4], n[5], op->params);
    for (int i = 0; i < num_devices; i++) mprotect(devices[i].device_view, CAPACITY, PROT_NONE);
    if (!error) return OK;
    problem("kernel: %s; ", error);
    devices[op->device].sticky = LAUNCH_FAILED;
    return LAUNCH_FAILED;
}

static void run_until(Stream *stream, uint64_t seq);

static void run(Op *op) {
    if (devices[op->device].sticky) return;
    char *memory;
    switch (op->kind) {
    case COPY: run_copy(op); break;
    case SET:
        memory = memory_at(op->dst, op->width);
        if (memory) memset(memory, op->value, op->width);
        else lose(op, ILLEGAL_ADDRESS, "memory set that was freed", op->dst);
        break;
    case LAUNCH: run_launch(op); break;
    case WAIT: run_until(op->on, op->until); break;
    }
}

// --- streams ---------------------------------------------------------------------------------------------------------------------

static void run_until(Stream *stream, uint64_t seq) {
    while (stream->head && stream->head->seq <= seq) {
        Op *op = stream->head;
        stream->head = op->next;
        if (!stream->head) stream->tail = &stream->head;
        run(op);
        stream->done = op->seq;
        free(op);
    }
}

static void run_all(Device *device) {
    run_until(&device->legacy, UINT64_MAX);
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->device == (int)(device - devices)) run_until(streams[i], UINT64_MAX);
}

static void append(Stream *stream, const Op *op) {
    Op *copy = malloc(sizeof *copy);
    *copy = *op;
    copy->next = NULL;
    copy->device = stream->device;
    if (stream->capture) {
        *stream->capture->tail = copy;
        stream->capture->tail = &copy->next;
        return;
    }
    copy->seq = ++stream->enqueued;
    *stream->tail = copy;
    stream->tail = &copy->next;
}

static void append_wait(Stream *stream, Stream *on, uint64_t until) {
    if (on->done < until) append(stream, &(Op){.kind = WAIT, .on = on, .until = until});
}

static int enqueue(Stream *stream, const Op *op) {
    Device *device = &devices[stream->device];
    if (!stream->capture) {
        if (stream == &device->legacy) {
            for (int i = 0; i < num_streams; i++)
                if (streams[i]->is_blocking && streams[i]->device == stream->device) append_wait(stream, streams[i], streams[i]->enqueued);
        } else if (stream->is_blocking) {
            append_wait(stream, &device->legacy, device->legacy.enqueued);
        }
    }
    append(stream, op);
    if (!is_lazy && !stream->capture) run_until(stream, UINT64_MAX);
    return device->sticky;
}

// The stream of a handle, in `*found`; handles 0 to 2 are the legacy stream.
static int stream_of(Device *device, void *handle, Stream **found) {
    *found = (uintptr_t)handle <= 2 ? &device->legacy : (Stream *)handle;
    if (*found == &device->legacy) {
        for (int i = 0; i < num_streams; i++) {
            if (!streams[i]->capture || !streams[i]->is_blocking || streams[i]->device != (int)(device - devices)) continue;
            streams[i]->capture->spoiled = 1;
            return CAPTURE_IMPLICIT;
        }
        return OK;
    }
    for (int i = 0; i < num_streams; i++)
        if (streams[i] == *found && streams[i]->device == (int)(device - devices)) return OK;
    problem("%p is no stream of this context, or was destroyed; ", handle);
    return INVALID_HANDLE;
}

static int copy(Device *device, void *handle, Op op, int is_async) {
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code) return code;
    op.kind = COPY;
    if (!op.width || !op.height) return OK;
    if (op.height > 1 && (op.dst_pitch < op.width || op.src_pitch < op.width)) return INVALID_VALUE;
    if (!op.dst_is_host && !memory_at(op.dst, extent(op.dst_pitch, op.width, op.height))) return INVALID_VALUE;
    if (!op.src_is_host && !memory_at(op.src, extent(op.src_pitch, op.width, op.height))) return INVALID_VALUE;
    Address host = op.dst_is_host ? op.dst : op.src_is_host ? op.src : 0;
    if (is_async && host && !find(pinned, num_pinned, host, 1)) num_pageable++;
    code = enqueue(stream, &op);
    if (!is_async) run_until(stream, UINT64_MAX);
    return code ? code : device->sticky;
}

// --- start, devices, contexts ----------------------------------------------------------------------------------------------------

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int open_device(int ordinal) {
    Device *device = &devices[ordinal];
    char *wanted = (char *)(FIRST_ADDRESS + ordinal * CAPACITY);
    device->file = memfd_create("fakecuda", MFD_CLOEXEC);
    if (device->file < 0 || ftruncate(device->file, CAPACITY)) return OUT_OF_MEMORY;
    device->device_view = mmap(wanted, CAPACITY, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, device->file, 0);
    device->shadow = mmap(NULL, CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, device->file, 0);
    if (device->device_view != wanted || device->shadow == MAP_FAILED) return OUT_OF_MEMORY;
    device->legacy = (Stream){.device = ordinal, .id = next_id++};
    device->legacy.tail = &device->legacy.head;
    return OK;
}

EXPORT int cuInit(unsigned flags) {
    int held __attribute__((cleanup(unlock))) = !pthread_mutex_lock(&mutex);
    int injected = count("cuInit");
    if (injected) return injected;
    if (flags) return INVALID_VALUE;
    if (is_initialized) return OK;
    num_devices = number_from("FAKE_CUDA_DEVICES", 1);
    // A test may have said so before; a launch that waits after all would find its tensors freed.
    if (is_lazy < 0) is_lazy = number_from("FAKE_CUDA_LAZY", 1);
    arch = number_from("FAKE_CUDA_ARCH", 90);
    if (num_devices < 1) return NO_DEVICE;
    if (num_devices > MAX_DEVICES) return INVALID_VALUE;
    devices = calloc(num_devices, sizeof *devices);
    for (int i = 0; i < num_devices; i++) {
        int code = open_device(i);
        if (code) return code;
    }
    is_initialized = 1;
    return OK;
}

EXPORT int cuDriverGetVersion(int *version) {
    *version = 13020;
    return OK;
}

EXPORT int cuDeviceGetCount(int *number) {
    ENTER("cuDeviceGetCount");
    *number = num_devices;
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
    ENTER("cuDeviceGetName");
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    snprintf(name, size, "Fake GPU %d", device);
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER("cuDeviceTotalMem");
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    *bytes = CAPACITY;
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(char *uuid, int device) {
    ENTER("cuDeviceGetUuid");
    memset(uuid, 0x11 + device, 16);
    return OK;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER("cuDeviceGetAttribute");
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    static const int known[][2] = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152},
                                   {9, 65536}, {10, 32}, {12, 65536}, {13, 1000000}, {16, 8}, {39, 2048}, {41, 1}, {81, 233472},
                                   {82, 65536}, {97, 232448}};
    *value = attribute == 75 ? arch / 10 : attribute == 76 ? arch % 10 : 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return OK;
}

static void *context_of(int ordinal) {
    return ordinal < 0 ? NULL : &devices[ordinal];
}

static int ordinal_of(void *context) {
    for (int i = 0; i < num_devices; i++)
        if (context == &devices[i]) return i;
    return -1;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    devices[device].retained++;
    *context = context_of(device);
    return OK;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER("cuDevicePrimaryCtxRelease");
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    if (!devices[device].retained) return INVALID_CONTEXT;
    devices[device].retained--;
    return OK;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER("cuDevicePrimaryCtxGetState");
    *flags = 0;
    *active = devices[device].retained > 0;
    return OK;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
    ENTER("cuCtxPushCurrent");
    int ordinal = ordinal_of(context);
    if (ordinal < 0 || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = ordinal;
    return OK;
}

EXPORT int cuCtxPopCurrent_v2(void **context) {
    ENTER("cuCtxPopCurrent");
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = context_of(stack[depth]);
    return OK;
}

EXPORT int cuCtxGetCurrent(void **context) {
    ENTER("cuCtxGetCurrent");
    *context = depth ? context_of(stack[depth - 1]) : NULL;
    return OK;
}

EXPORT int cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent");
    int ordinal = ordinal_of(context);
    if (context && ordinal < 0) return INVALID_CONTEXT;
    if (!context) depth -= depth > 0; // as a pop
    else if (depth) stack[depth - 1] = ordinal;
    else stack[depth++] = ordinal;
    return OK;
}

EXPORT int cuCtxGetDevice(int *ordinal) {
    IN_CONTEXT("cuCtxGetDevice");
    *ordinal = (int)(device - devices);
    return OK;
}

EXPORT int cuCtxSynchronize(void) {
    IN_CONTEXT("cuCtxSynchronize");
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->capture && streams[i]->device == (int)(device - devices)) {
            streams[i]->capture->spoiled = 1;
            return CAPTURE_UNSUPPORTED;
        }
    run_all(device);
    return device->sticky;
}

// --- allocation ------------------------------------------------------------------------------------------------------------------

EXPORT int cuMemAlloc_v2(Address *address, size_t size) {
    NOT_IN_CAPTURE("cuMemAlloc");
    if (!size) return INVALID_VALUE;
    // Never the same address twice, and a gap behind each: what runs past its end or comes too late is seen.
    Address begin = device->top;
    if (size > CAPACITY - begin || device->num_blocks == MAX_BLOCKS) return OUT_OF_MEMORY;
    *address = (Address)device->device_view + begin;
    device->blocks[device->num_blocks++] = (Block){*address, size, 1};
    memset(device->shadow + begin, 0xff, size);
    device->top = (begin + size + 1023) & ~(Address)511;
    return OK;
}

EXPORT int cuMemFree_v2(Address address) {
    NOT_IN_CAPTURE("cuMemFree");
    if (!address) return OK;
    run_all(device);
    int ordinal = device_of(address);
    Block *block = ordinal < 0 ? NULL : find(devices[ordinal].blocks, devices[ordinal].num_blocks, address, 1);
    if (!block || block->base != address || !block->live) return INVALID_VALUE;
    block->live = 0;
    return device->sticky;
}

EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total) {
    IN_CONTEXT("cuMemGetInfo");
    *total = CAPACITY;
    *available = CAPACITY - device->top;
    return OK;
}

EXPORT int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    NOT_IN_CAPTURE("cuMemHostAlloc");
    if (!size || flags > 7) return INVALID_VALUE;
    if (num_pinned == MAX_BLOCKS) return OUT_OF_MEMORY;
    *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*memory == MAP_FAILED) return OUT_OF_MEMORY;
    pinned[num_pinned++] = (Block){(Address)*memory, size, 1};
    return OK;
}

EXPORT int cuMemAllocHost_v2(void **memory, size_t size) {
    return cuMemHostAlloc(memory, size, 0);
}

EXPORT int cuMemFreeHost(void *memory) {
    NOT_IN_CAPTURE("cuMemFreeHost");
    Block *block = find(pinned, num_pinned, (Address)memory, 1);
    if (!block || block->base != (Address)memory || !block->live) return INVALID_VALUE;
    run_all(device);
    block->live = 0;
    // The addresses stay taken, without memory: whoever still uses them is stopped there.
    mmap(memory, block->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return device->sticky;
}

EXPORT int cuPointerGetAttribute(void *value, int attribute, Address address) {
    ENTER("cuPointerGetAttribute");
    int ordinal = device_of(address);
    Block *block = ordinal < 0 ? NULL : find(devices[ordinal].blocks, devices[ordinal].num_blocks, address, 1);
    if (!block || !block->live) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)value = context_of(ordinal); return OK;
    case 2: *(unsigned *)value = 2; return OK;
    case 3: *(Address *)value = address; return OK;
    case 9: *(int *)value = ordinal; return OK;
    case 11: *(Address *)value = block->base; return OK;
    case 12: *(size_t *)value = block->size; return OK;
    default: return INVALID_VALUE;
    }
}

// --- copies ----------------------------------------------------------------------------------------------------------------------

#define ROW(bytes) .width = (bytes), .height = 1, .dst_pitch = (bytes), .src_pitch = (bytes)

EXPORT int cuMemcpyHtoDAsync_v2(Address dst, const void *src, size_t size, void *stream) {
    IN_CONTEXT("cuMemcpyHtoDAsync");
    return copy(device, stream, (Op){.dst = dst, .src = (Address)src, .src_is_host = 1, ROW(size)}, 1);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *dst, Address src, size_t size, void *stream) {
    IN_CONTEXT("cuMemcpyDtoHAsync");
    return copy(device, stream, (Op){.dst = (Address)dst, .src = src, .dst_is_host = 1, ROW(size)}, 1);
}

EXPORT int cuMemcpyDtoDAsync_v2(Address dst, Address src, size_t size, void *stream) {
    IN_CONTEXT("cuMemcpyDtoDAsync");
    return copy(device, stream, (Op){.dst = dst, .src = src, ROW(size)}, 1);
}

EXPORT int cuMemcpyHtoD_v2(Address dst, const void *src, size_t size) {
    NOT_IN_CAPTURE("cuMemcpyHtoD");
    return copy(device, NULL, (Op){.dst = dst, .src = (Address)src, .src_is_host = 1, ROW(size)}, 0);
}

EXPORT int cuMemcpyDtoH_v2(void *dst, Address src, size_t size) {
    NOT_IN_CAPTURE("cuMemcpyDtoH");
    return copy(device, NULL, (Op){.dst = (Address)dst, .src = src, .dst_is_host = 1, ROW(size)}, 0);
}

typedef struct {
    size_t src_x, src_y;
    int src_type;
    const void *src_host;
    Address src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    int dst_type;
    void *dst_host;
    Address dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
} Memcpy2D;

EXPORT int cuMemcpy2DAsync_v2(const Memcpy2D *p, void *stream) {
    IN_CONTEXT("cuMemcpy2DAsync");
    Op op = {.src_is_host = p->src_type == 1, .dst_is_host = p->dst_type == 1, .src_pitch = p->src_pitch, .dst_pitch = p->dst_pitch,
             .width = p->width, .height = p->height};
    op.src = (op.src_is_host ? (Address)p->src_host : p->src_device) + p->src_y * p->src_pitch + p->src_x;
    op.dst = (op.dst_is_host ? (Address)p->dst_host : p->dst_device) + p->dst_y * p->dst_pitch + p->dst_x;
    if ((p->src_type != 1 && p->src_type != 2) || (p->dst_type != 1 && p->dst_type != 2)) return INVALID_VALUE;
    return copy(device, stream, op, 1);
}

EXPORT int cuMemsetD8Async(Address dst, unsigned char value, size_t size, void *handle) {
    IN_CONTEXT("cuMemsetD8Async");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code || !size) return code;
    if (!memory_at(dst, size)) return INVALID_VALUE;
    return enqueue(stream, &(Op){.kind = SET, .dst = dst, .value = value, .width = size});
}

// --- streams and events ----------------------------------------------------------------------------------------------------------

EXPORT int cuStreamCreate(void **handle, unsigned flags) {
    IN_CONTEXT("cuStreamCreate");
    if (num_streams == MAX_STREAMS || flags > 1) return INVALID_VALUE;
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.device = (int)(device - devices), .is_blocking = !(flags & 1), .id = next_id++};
    stream->tail = &stream->head;
    streams[num_streams++] = stream;
    *handle = stream;
    return OK;
}

EXPORT int cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(handle, flags);
}

EXPORT int cuStreamDestroy_v2(void *handle) {
    IN_CONTEXT("cuStreamDestroy");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code || stream == &device->legacy) return code ? code : INVALID_HANDLE;
    // A real device finishes what is on it in its own time.
    run_until(stream, UINT64_MAX);
    // Out of the list, but never freed: its handle is not given out again, and a later use of it is seen.
    for (int i = 0; i < num_streams; i++)
        if (streams[i] == stream) streams[i] = streams[--num_streams];
    return device->sticky;
}

EXPORT int cuStreamSynchronize(void *handle) {
    NOT_IN_CAPTURE("cuStreamSynchronize");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code) return code;
    if (stream->capture) {
        stream->capture->spoiled = 1;
        return CAPTURE_UNSUPPORTED;
    }
    if (stream == &device->legacy)
        for (int i = 0; i < num_streams; i++)
            if (streams[i]->is_blocking && streams[i]->device == stream->device) run_until(streams[i], UINT64_MAX);
    run_until(stream, UINT64_MAX);
    return device->sticky;
}

EXPORT int cuStreamQuery(void *handle) {
    NOT_IN_CAPTURE("cuStreamQuery");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    return code ? code : stream->head ? NOT_READY : OK;
}

EXPORT int cuStreamGetId(void *handle, unsigned long long *id) {
    IN_CONTEXT("cuStreamGetId");
    Stream *stream = (uintptr_t)handle <= 2 ? &device->legacy : (Stream *)handle;
    *id = stream->id;
    return OK;
}

EXPORT int cuStreamIsCapturing(void *handle, int *status) {
    IN_CONTEXT("cuStreamIsCapturing");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code) return code;
    *status = !stream->capture ? 0 : stream->capture->spoiled ? 2 : 1;
    return OK;
}

EXPORT int cuStreamWaitEvent(void *handle, void *handle_of_event, unsigned flags) {
    IN_CONTEXT("cuStreamWaitEvent");
    Stream *stream;
    Event *event = handle_of_event;
    int code = stream_of(device, handle, &stream);
    if (code) return code;
    if (flags) return INVALID_VALUE;
    if (!event->live) {
        problem("a wait for an event that was destroyed; ");
        return INVALID_HANDLE;
    }
    if (event->is_captured && !stream->capture) return CAPTURE_ISOLATION;
    if (event->stream && !event->is_captured) append_wait(stream, event->stream, event->seq);
    return OK;
}

EXPORT int cuEventCreate(void **handle, unsigned flags) {
    IN_CONTEXT("cuEventCreate");
    (void)flags;
    Event *event = calloc(1, sizeof *event);
    event->live = 1;
    num_live_events++;
    *handle = event;
    return OK;
}

EXPORT int cuEventDestroy_v2(void *handle) {
    IN_CONTEXT("cuEventDestroy");
    Event *event = handle;
    if (!event->live) {
        problem("an event was destroyed twice; ");
        return INVALID_HANDLE;
    }
    // Kept as it is, so that a later use is seen.
    event->live = 0;
    num_live_events--;
    return OK;
}

EXPORT int cuEventRecord(void *handle, void *handle_of_stream) {
    IN_CONTEXT("cuEventRecord");
    Stream *stream;
    Event *event = handle;
    int code = stream_of(device, handle_of_stream, &stream);
    if (code) return code;
    if (!event->live) {
        problem("a record of an event that was destroyed; ");
        return INVALID_HANDLE;
    }
    if (stream == &device->legacy)
        for (int i = 0; i < num_streams; i++)
            if (streams[i]->is_blocking && streams[i]->device == stream->device) append_wait(stream, streams[i], streams[i]->enqueued);
    *event = (Event){stream, stream->enqueued, 1, stream->capture != NULL};
    return OK;
}

EXPORT int cuEventQuery(void *handle) {
    NOT_IN_CAPTURE("cuEventQuery");
    Event *event = handle;
    if (event->is_captured) return CAPTURED_EVENT;
    return event->stream && event->stream->done < event->seq ? NOT_READY : OK;
}

EXPORT int cuEventSynchronize(void *handle) {
    NOT_IN_CAPTURE("cuEventSynchronize");
    Event *event = handle;
    if (!event->live) {
        problem("a wait for an event that was destroyed; ");
        return INVALID_HANDLE;
    }
    if (event->is_captured) return CAPTURED_EVENT;
    if (event->stream) run_until(event->stream, event->seq);
    return device->sticky;
}

// --- modules and launches --------------------------------------------------------------------------------------------------------

EXPORT int cuModuleLoadData(void **module, const void *image) {
    NOT_IN_CAPTURE("cuModuleLoadData");
    const char *path = getenv("FAKE_CUDA_KERNELS");
    if (!image) return INVALID_VALUE;
    if (!kernels && path) kernels = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!kernels) {
        problem("no kernels: %s; ", path ? dlerror() : "FAKE_CUDA_KERNELS is not set");
        return INVALID_IMAGE;
    }
    *module = kernels;
    return OK;
}

EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned number, int *options, void **values) {
    (void)number, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

EXPORT int cuModuleUnload(void *module) {
    ENTER("cuModuleUnload");
    (void)module;
    return OK;
}

EXPORT int cuModuleGetFunction(void **handle, void *module, const char *name) {
    IN_CONTEXT("cuModuleGetFunction");
    char symbol[256];
    Function *function = calloc(1, sizeof *function);
    snprintf(symbol, sizeof symbol, "cuemu_launch_%s", name);
    *(void **)&function->launch = dlsym(module, symbol);
    snprintf(symbol, sizeof symbol, "cuemu_args_%s", name);
    *(void **)&function->args = dlsym(module, symbol);
    *(void **)&function->shared = dlsym(module, "cuemu_set_shared");
    if (!function->launch || !function->args) {
        free(function);
        return NOT_FOUND;
    }
    *handle = function;
    return OK;
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
    ENTER("cuFuncSetAttribute");
    (void)function, (void)attribute, (void)value;
    return OK;
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    ENTER("cuFuncGetAttribute");
    (void)function;
    *value = attribute == 0 ? 1024 : attribute == 5 || attribute == 6 ? arch : 0;
    return OK;
}

EXPORT int cuLaunchKernel(void *handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                          void *handle_of_stream, void **params, void **extra) {
    IN_CONTEXT("cuLaunchKernel");
    Stream *stream;
    int code = stream_of(device, handle_of_stream, &stream);
    if (code) return code;
    if (extra || !gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || (uint64_t)bx * by * bz > 1024) return INVALID_VALUE;
    Op op = {.kind = LAUNCH, .function = handle, .sizes = {gx, gy, gz, bx, by, bz}, .shared = shared};
    // The arguments are copied when it is enqueued, as by the driver.
    unsigned sizes[256];
    int number = op.function->args(sizes);
    op.params = calloc(number + 1, sizeof *op.params);
    last_args_size = 0;
    for (int i = 0; i < number; i++) {
        op.params[i] = malloc(sizes[i]);
        memcpy(op.params[i], params[i], sizes[i]);
        if (last_args_size + sizes[i] <= sizeof last_args) {
            memcpy(last_args + last_args_size, params[i], sizes[i]);
            last_args_size += sizes[i];
        }
    }
    return enqueue(stream, &op);
}

// --- capture and graphs ----------------------------------------------------------------------------------------------------------

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode");
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    int before = exchange_mode;
    exchange_mode = *mode;
    *mode = before;
    return OK;
}

EXPORT int cuStreamBeginCapture_v2(void *handle, int mode) {
    IN_CONTEXT("cuStreamBeginCapture");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code) return code;
    if (stream == &device->legacy || stream->capture) return CAPTURE_UNSUPPORTED;
    stream->capture = calloc(1, sizeof *stream->capture);
    *stream->capture = (Capture){.mode = mode, .thread = pthread_self()};
    stream->capture->tail = &stream->capture->head;
    return OK;
}

EXPORT int cuStreamEndCapture(void *handle, void **graph) {
    IN_CONTEXT("cuStreamEndCapture");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    if (code) return code;
    Capture *capture = stream->capture;
    if (!capture) return CAPTURE_UNMATCHED;
    if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self())) return CAPTURE_WRONG_THREAD;
    stream->capture = NULL;
    *graph = NULL;
    if (capture->spoiled) return CAPTURE_INVALIDATED;
    Graph *made = calloc(1, sizeof *made);
    made->head = capture->head;
    for (Op *op = made->head; op; op = op->next) made->num_nodes++;
    *graph = made;
    return OK;
}

EXPORT int cuGraphGetNodes(void *graph, void **nodes, size_t *number) {
    ENTER("cuGraphGetNodes");
    (void)nodes;
    *number = ((Graph *)graph)->num_nodes;
    return OK;
}

EXPORT int cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) {
    IN_CONTEXT("cuGraphInstantiate");
    (void)flags;
    *made = graph;
    return OK;
}

EXPORT int cuGraphLaunch(void *graph, void *handle) {
    IN_CONTEXT("cuGraphLaunch");
    Stream *stream;
    int code = stream_of(device, handle, &stream);
    for (Op *op = ((Graph *)graph)->head; op && !code; op = op->next) code = enqueue(stream, op);
    return code;
}

EXPORT int cuGraphExecDestroy(void *graph) {
    ENTER("cuGraphExecDestroy");
    (void)graph;
    return OK;
}

EXPORT int cuGraphDestroy(void *graph) {
    ENTER("cuGraphDestroy");
    (void)graph;
    return OK;
}

// --- words for codes, and finding entry points -----------------------------------------------------------------------------------

static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
};

EXPORT int cuGetErrorName(int code, const char **name) {
    *name = NULL;
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *name = errors[i].name;
    return *name ? OK : INVALID_VALUE;
}

EXPORT int cuGetErrorString(int code, const char **text) {
    *text = NULL;
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *text = errors[i].text;
    return *text ? OK : INVALID_VALUE;
}

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    static void *self;
    (void)version, (void)flags;
    if (!self) {
        Dl_info info;
        dladdr((void *)cuInit, &info);
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    char symbol[256];
    snprintf(symbol, sizeof symbol, "%s_v2", name);
    *function = dlsym(self, symbol);
    if (!*function) *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

// --- for tests -------------------------------------------------------------------------------------------------------------------

// Counts from 0 again, and lets call `n` fail with `code` before it does anything; with `is_sticky`, all later ones too.
EXPORT void fakecuda_fail_at(uint64_t n, int code, int is_sticky) {
    pthread_mutex_lock(&mutex);
    calls = 0;
    fail_at = n;
    fail_code = code;
    fail_is_sticky = is_sticky;
    failed_name[0] = 0;
    memset(names, 0, sizeof names);
    pthread_mutex_unlock(&mutex);
}

// Calls since the counting began.
EXPORT uint64_t fakecuda_calls(void) {
    return calls;
}

// Calls of that name since the counting began.
EXPORT uint64_t fakecuda_count(const char *name) {
    for (int i = 0; i < MAX_NAMES; i++)
        if (!strcmp(names[i].name, name)) return names[i].count;
    return 0;
}

// The call that was made to fail, "" if none was.
EXPORT const char *fakecuda_failed(void) {
    return failed_name;
}

// What is alive: "memory", "pinned", "streams", "events", "contexts" (retained), or "pushed" (contexts on this thread's stack).
EXPORT int fakecuda_live(const char *what) {
    int found = 0;
    pthread_mutex_lock(&mutex);
    for (int d = 0; d < num_devices; d++) {
        for (int i = 0; i < devices[d].num_blocks && !strcmp(what, "memory"); i++) found += devices[d].blocks[i].live;
        if (!strcmp(what, "contexts")) found += devices[d].retained;
    }
    for (int i = 0; i < num_pinned && !strcmp(what, "pinned"); i++) found += pinned[i].live;
    if (!strcmp(what, "streams")) found = num_streams;
    if (!strcmp(what, "events")) found = num_live_events;
    if (!strcmp(what, "pushed")) found = depth;
    pthread_mutex_unlock(&mutex);
    return found;
}

// Uses of freed memory, of dead handles, and kernels that reported an error: their number, and what they were.
EXPORT int fakecuda_problems(const char **text) {
    if (text) *text = problem_text;
    return num_problems;
}

// Asynchronous copies whose host memory was not pinned.
EXPORT int fakecuda_pageable(void) {
    return num_pageable;
}

// Forgets problems and pageable copies, and heals lost contexts.
EXPORT void fakecuda_forget(void) {
    pthread_mutex_lock(&mutex);
    problem_text[0] = 0;
    num_problems = num_pageable = 0;
    for (int i = 0; i < num_devices; i++) devices[i].sticky = OK;
    pthread_mutex_unlock(&mutex);
}

// Whether work waits until something waits for it.
EXPORT void fakecuda_lazy(int lazy) {
    is_lazy = lazy;
}

// The emulator library that modules are loaded from; 0 if it cannot be opened.
EXPORT int fakecuda_kernels(const char *path) {
    pthread_mutex_lock(&mutex);
    kernels = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    pthread_mutex_unlock(&mutex);
    return kernels != NULL;
}

// The bytes of the arguments of the last launch, one after the other, and their number.
EXPORT size_t fakecuda_last_args(void *bytes, size_t room) {
    memcpy(bytes, last_args, last_args_size < room ? last_args_size : room);
    return last_args_size;
}
