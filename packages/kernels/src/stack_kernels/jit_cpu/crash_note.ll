; Writes the last entered kernel to standard error, then passes the signal to the previous handler.

declare i64 @strlen(ptr)
declare i64 @write(i32, ptr, i64)
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @raise(i32)

@stack_kernels_last_kernel = external global ptr
@earlier = global [32 x [152 x i8]] zeroinitializer  ; struct sigaction, by the signal's number
@says = internal constant [52 x i8] c"stack-kernels: the kernel that was entered last is \00"
@ends = internal constant [1 x i8] c"\0A"

define void @note(i32 %signal, ptr %info, ptr %context) {
  %name = load ptr, ptr @stack_kernels_last_kernel
  %is_none = icmp eq ptr %name, null
  br i1 %is_none, label %hand_over, label %say
say:
  %says.length = call i64 @strlen(ptr @says)
  %1 = call i64 @write(i32 2, ptr @says, i64 %says.length)
  %length = call i64 @strlen(ptr %name)
  %2 = call i64 @write(i32 2, ptr %name, i64 %length)
  %3 = call i64 @write(i32 2, ptr @ends, i64 1)
  br label %hand_over
hand_over:
  %number = sext i32 %signal to i64
  %action = getelementptr [32 x [152 x i8]], ptr @earlier, i64 0, i64 %number
  %4 = call i32 @sigaction(i32 %signal, ptr %action, ptr null)
  ; A fault of the processor recurs by itself on return; an abort does not.
  %is_abort = icmp eq i32 %signal, 6
  br i1 %is_abort, label %again, label %end
again:
  %5 = call i32 @raise(i32 %signal)
  br label %end
end:
  ret void
}
