; The handler of XLA's foreign function interface that runs a kernel's tiles on XLA's threads.
;
; Offsets are those of the C structs in jaxlib's xla/ffi/api/c_api.h, version 0.3 and on, which only ever grow at their
; ends. Errors of the pool are not passed on: what it does not take, the caller's thread does.

declare i64 @tiles(ptr, ptr)
declare i64 @is_small(ptr, ptr)
declare void @tile(ptr, ptr, i64)
declare void @finish(ptr, ptr)
declare ptr @malloc(i64)
declare void @free(ptr)
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.x86.sse2.pause()

; The work of one call. It is on the heap, for a thread may come to it after all is done.
%Job = type {
  i64,  ; the next tile that nobody has taken
  i64,  ; tiles that are done
  i64,  ; threads that may still look at the job
  i64,  ; tiles
  ptr,  ; XLA_FFI_Buffer*[] of the arguments
  ptr   ; XLA_FFI_Buffer*[] of the results
}

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

define internal void @work(ptr %job) {
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
  call void @tile(ptr %arguments, ptr %results, i64 %tile)
  %unused = atomicrmw add ptr %done, i64 1 release
  br label %take
end:
  ret void
}

define internal void @task(ptr %job) {
  call void @work(ptr %job)
  call void @release(ptr %job)
  ret void
}

; XLA asks once, when the handler is registered: it is written for the version of the library that asks.
define internal void @answer_version(ptr %frame, ptr %extension) {
  %api.at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api.at
  %theirs.at = getelementptr i8, ptr %api, i64 32
  %version = load i64, ptr %theirs.at, align 4
  %metadata.at = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata.at
  %ours.at = getelementptr i8, ptr %metadata, i64 24
  store i64 %version, ptr %ours.at, align 4
  ret void
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

define internal void @run_shared(ptr %frame, ptr %arguments, ptr %results, i64 %tiles) {
  %api.at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api.at
  %context.at = getelementptr i8, ptr %frame, i64 24
  %context = load ptr, ptr %context.at
  %pool = call i64 @threads(ptr %api, ptr %context)
  %users = call i64 @llvm.smin.i64(i64 %pool, i64 %tiles)
  %job = call ptr @malloc(i64 48)
  %with.users = insertvalue %Job { i64 0, i64 0, i64 0, i64 0, ptr null, ptr null }, i64 %users, 2
  %with.tiles = insertvalue %Job %with.users, i64 %tiles, 3
  %with.arguments = insertvalue %Job %with.tiles, ptr %arguments, 4
  %with.results = insertvalue %Job %with.arguments, ptr %results, 5
  store %Job %with.results, ptr %job
  %helpers = sub i64 %users, 1
  call void @share(ptr %api, ptr %context, ptr %job, i64 %helpers)
  call void @work(ptr %job)
  %done.at = getelementptr %Job, ptr %job, i64 0, i32 1
  br label %look
look:
  %done = load atomic i64, ptr %done.at acquire, align 8
  %is_all = icmp eq i64 %done, %tiles
  br i1 %is_all, label %end, label %wait
wait:
  call void @llvm.x86.sse2.pause()
  br label %look
end:
  call void @release(ptr %job)
  ret void
}

define internal void @run_alone(ptr %arguments, ptr %results, i64 %tiles) {
  br label %next
next:
  %tile = phi i64 [0, %0], [%following, %run]
  %is_left = icmp slt i64 %tile, %tiles
  br i1 %is_left, label %run, label %end
run:
  call void @tile(ptr %arguments, ptr %results, i64 %tile)
  %following = add i64 %tile, 1
  br label %next
end:
  ret void
}

define ptr @handler(ptr %frame) {
  %extension.at = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension.at
  %is_question = icmp ne ptr %extension, null
  br i1 %is_question, label %answer, label %execute
answer:
  call void @answer_version(ptr %frame, ptr %extension)
  ret ptr null
execute:
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
  call void @run_alone(ptr %arguments, ptr %results, i64 %tiles)
  br label %end
shared:
  call void @run_shared(ptr %frame, ptr %arguments, ptr %results, i64 %tiles)
  br label %end
end:
  call void @finish(ptr %arguments, ptr %results)
  ret ptr null
}
