; The handler of XLA's foreign function interface that runs a kernel's tiles on XLA's threads.
;
; Offsets follow the C structs in jaxlib's xla/ffi/api/c_api.h from version 0.3 on, which only ever grow at their ends.
; Errors of the pool are not propagated: tiles that it rejects run on the caller's thread.

declare i64 @tiles(ptr, ptr)
declare i64 @is_small(ptr, ptr)
declare void @tile(ptr, ptr, i64, ptr)
declare void @finish(ptr, ptr)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.x86.sse2.pause()

@scratch_bytes = external constant i64  ; memory per thread in addition to its stack, a multiple of 64
@kernel_name = external constant i8     ; ends with a zero
@stack_kernels_last_kernel = external global ptr

@no_memory = internal constant [51 x i8] c"stack-kernels: there is no memory for a scratchpad\00"

; The work of one call. It is on the heap, because a thread may reach it after all work is done.
%Job = type {
  i64,  ; next unclaimed tile
  i64,  ; finished tiles
  i64,  ; threads that may still access the job
  i64,  ; tiles
  ptr,  ; XLA_FFI_Buffer*[] of the arguments
  ptr   ; XLA_FFI_Buffer*[] of the results
}

%ErrorCreate = type { i64, ptr, ptr, i32 }        ; size, extensions, message, code
%ErrorDestroy = type { i64, ptr, ptr }            ; size, extensions, error
%NumThreads = type { i64, ptr, ptr, ptr }         ; size, extensions, context, int64_t*
%Schedule = type { i64, ptr, ptr, ptr, ptr }      ; size, extensions, context, task, its argument

define internal void @release(ptr %job) {
  %users = getelementptr %Job, ptr %job, i64 0, i32 2
  %before = atomicrmw sub ptr %users, i64 1 acq_rel
  %is_last = icmp eq i64 %before, 1
  br i1 %is_last, label %drop, label %end
drop:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}

define internal void @work(ptr %job, ptr %scratch) {
  %done = getelementptr %Job, ptr %job, i64 0, i32 1
  %tiles.at = getelementptr %Job, ptr %job, i64 0, i32 3
  %tiles = load i64, ptr %tiles.at
  %arguments.at = getelementptr %Job, ptr %job, i64 0, i32 4
  %arguments = load ptr, ptr %arguments.at
  %results.at = getelementptr %Job, ptr %job, i64 0, i32 5
  %results = load ptr, ptr %results.at
  br label %take
take:
  %tile = atomicrmw add ptr %job, i64 1 acq_rel
  %is_left = icmp slt i64 %tile, %tiles
  br i1 %is_left, label %run, label %end
run:
  call void @tile(ptr %arguments, ptr %results, i64 %tile, ptr %scratch)
  %unused = atomicrmw add ptr %done, i64 1 release
  br label %take
end:
  ret void
}

; A thread that cannot allocate memory leaves its tiles to the other threads.
define internal void @task(ptr %job) {
  %scratch = call ptr @new_scratch()
  %is_none = icmp eq ptr %scratch, null
  br i1 %is_none, label %end, label %run
run:
  call void @work(ptr %job, ptr %scratch)
  call void @free(ptr %scratch)
  br label %end
end:
  call void @release(ptr %job)
  ret void
}

; On the heap, because thread stacks may be small and kernels need up to 2 MB. Null if allocation fails.
define internal ptr @new_scratch() {
  %wanted = load i64, ptr @scratch_bytes
  %is_none = icmp eq i64 %wanted, 0
  %bytes = select i1 %is_none, i64 64, i64 %wanted
  %scratch = call ptr @aligned_alloc(i64 64, i64 %bytes)
  ret ptr %scratch
}

; Answers XLA's version query, made once when the handler is registered. This handler is written for version 0.3.
define internal void @answer_version(ptr %extension) {
  %metadata.at = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata.at
  %major.at = getelementptr i8, ptr %metadata, i64 24
  store i32 0, ptr %major.at
  %minor.at = getelementptr i8, ptr %metadata, i64 28
  store i32 3, ptr %minor.at
  ret void
}

; Returns the frame's metadata extension (type 1), or null; extensions of other types are ignored.
define internal ptr @question(ptr %frame) {
  %first.at = getelementptr i8, ptr %frame, i64 8
  br label %next
next:
  %at = phi ptr [%first.at, %0], [%following.at, %other]
  %extension = load ptr, ptr %at
  %is_last = icmp eq ptr %extension, null
  br i1 %is_last, label %end, label %look
look:
  %type.at = getelementptr i8, ptr %extension, i64 8
  %type = load i32, ptr %type.at
  %is_question = icmp eq i32 %type, 1
  br i1 %is_question, label %end, label %other
other:
  %following.at = getelementptr i8, ptr %extension, i64 16
  br label %next
end:
  ret ptr %extension
}

define internal ptr @out_of_memory(ptr %frame) {
  %api.at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api.at
  %order = alloca %ErrorCreate
  store %ErrorCreate { i64 28, ptr null, ptr @no_memory, i32 8 }, ptr %order  ; RESOURCE_EXHAUSTED
  %create.at = getelementptr i8, ptr %api, i64 48
  %create = load ptr, ptr %create.at
  %error = call ptr %create(ptr %order)
  ret ptr %error
}

define internal i64 @threads(ptr %api, ptr %context) {
  %count = alloca i64
  store i64 1, ptr %count
  %question = alloca %NumThreads
  store %NumThreads { i64 32, ptr null, ptr null, ptr null }, ptr %question
  %context.at = getelementptr %NumThreads, ptr %question, i64 0, i32 2
  store ptr %context, ptr %context.at
  %count.at = getelementptr %NumThreads, ptr %question, i64 0, i32 3
  store ptr %count, ptr %count.at
  %ask.at = getelementptr i8, ptr %api, i64 144
  %ask = load ptr, ptr %ask.at
  %error = call ptr %ask(ptr %question)
  call void @destroy(ptr %api, ptr %error)
  %threads = load i64, ptr %count
  ret i64 %threads
}

define internal void @destroy(ptr %api, ptr %error) {
  %is_error = icmp ne ptr %error, null
  br i1 %is_error, label %free, label %end
free:
  %order = alloca %ErrorDestroy
  store %ErrorDestroy { i64 24, ptr null, ptr null }, ptr %order
  %error.at = getelementptr %ErrorDestroy, ptr %order, i64 0, i32 2
  store ptr %error, ptr %error.at
  %destroy.at = getelementptr i8, ptr %api, i64 64
  %destroy = load ptr, ptr %destroy.at
  call void %destroy(ptr %order)
  br label %end
end:
  ret void
}

define internal void @share(ptr %api, ptr %context, ptr %job, i64 %helpers) {
  %order = alloca %Schedule
  store %Schedule { i64 40, ptr null, ptr null, ptr @task, ptr null }, ptr %order
  %context.at = getelementptr %Schedule, ptr %order, i64 0, i32 2
  store ptr %context, ptr %context.at
  %job.at = getelementptr %Schedule, ptr %order, i64 0, i32 4
  store ptr %job, ptr %job.at
  %schedule.at = getelementptr i8, ptr %api, i64 136
  %schedule = load ptr, ptr %schedule.at
  br label %next
next:
  %helper = phi i64 [0, %0], [%following, %scheduled]
  %is_left = icmp slt i64 %helper, %helpers
  br i1 %is_left, label %ask, label %end
ask:
  %error = call ptr %schedule(ptr %order)
  %is_error = icmp ne ptr %error, null
  br i1 %is_error, label %refused, label %scheduled
refused:
  call void @destroy(ptr %api, ptr %error)
  call void @release(ptr %job)
  br label %scheduled
scheduled:
  %following = add i64 %helper, 1
  br label %next
end:
  ret void
}

; Waits for the other threads by polling for about 50 us, then by yielding the processor between polls.
define internal void @run_shared(ptr %frame, ptr %arguments, ptr %results, i64 %tiles, ptr %scratch) {
  %api.at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api.at
  %context.at = getelementptr i8, ptr %frame, i64 24
  %context = load ptr, ptr %context.at
  %pool = call i64 @threads(ptr %api, ptr %context)
  %users = call i64 @llvm.smin.i64(i64 %pool, i64 %tiles)
  %job = call ptr @aligned_alloc(i64 64, i64 64)
  %is_none = icmp eq ptr %job, null
  br i1 %is_none, label %alone, label %start
alone:
  call void @run_alone(ptr %arguments, ptr %results, i64 %tiles, ptr %scratch)
  ret void
start:
  %with.users = insertvalue %Job { i64 0, i64 0, i64 0, i64 0, ptr null, ptr null }, i64 %users, 2
  %with.tiles = insertvalue %Job %with.users, i64 %tiles, 3
  %with.arguments = insertvalue %Job %with.tiles, ptr %arguments, 4
  %with.results = insertvalue %Job %with.arguments, ptr %results, 5
  store %Job %with.results, ptr %job
  %helpers = sub i64 %users, 1
  call void @share(ptr %api, ptr %context, ptr %job, i64 %helpers)
  call void @work(ptr %job, ptr %scratch)
  %done.at = getelementptr %Job, ptr %job, i64 0, i32 1
  br label %look
look:
  %looks = phi i64 [0, %start], [%following, %pause], [%following, %yield]
  %following = add i64 %looks, 1
  %done = load atomic i64, ptr %done.at acquire, align 8
  %is_all = icmp eq i64 %done, %tiles
  br i1 %is_all, label %end, label %wait
wait:
  %is_short = icmp slt i64 %looks, 1024
  br i1 %is_short, label %pause, label %yield
pause:
  call void @llvm.x86.sse2.pause()
  br label %look
yield:
  %unused = call i32 @sched_yield()
  br label %look
end:
  call void @release(ptr %job)
  ret void
}

define internal void @run_alone(ptr %arguments, ptr %results, i64 %tiles, ptr %scratch) {
  br label %next
next:
  %tile = phi i64 [0, %0], [%following, %run]
  %is_left = icmp slt i64 %tile, %tiles
  br i1 %is_left, label %run, label %end
run:
  call void @tile(ptr %arguments, ptr %results, i64 %tile, ptr %scratch)
  %following = add i64 %tile, 1
  br label %next
end:
  ret void
}

define ptr @handler(ptr %frame) {
  %extension = call ptr @question(ptr %frame)
  %is_question = icmp ne ptr %extension, null
  br i1 %is_question, label %answer, label %execute
answer:
  call void @answer_version(ptr %extension)
  ret ptr null
execute:
  store ptr @kernel_name, ptr @stack_kernels_last_kernel
  %scratch = call ptr @new_scratch()
  %is_none = icmp eq ptr %scratch, null
  br i1 %is_none, label %refuse, label %begin
refuse:
  %error = call ptr @out_of_memory(ptr %frame)
  ret ptr %error
begin:
  %arguments.at = getelementptr i8, ptr %frame, i64 72
  %arguments = load ptr, ptr %arguments.at
  %results.at = getelementptr i8, ptr %frame, i64 112
  %results = load ptr, ptr %results.at
  %tiles = call i64 @tiles(ptr %arguments, ptr %results)
  %is_one = icmp slt i64 %tiles, 2
  br i1 %is_one, label %alone, label %several
several:
  %small = call i64 @is_small(ptr %arguments, ptr %results)
  %is_small = icmp ne i64 %small, 0
  br i1 %is_small, label %alone, label %shared
alone:
  call void @run_alone(ptr %arguments, ptr %results, i64 %tiles, ptr %scratch)
  br label %end
shared:
  call void @run_shared(ptr %frame, ptr %arguments, ptr %results, i64 %tiles, ptr %scratch)
  br label %end
end:
  call void @finish(ptr %arguments, ptr %results)
  call void @free(ptr %scratch)
  ret ptr null
}
