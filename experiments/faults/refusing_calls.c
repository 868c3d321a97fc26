/* Refuses, shortens or delays calls of a process on some files. It is asked anew at each call, by four variables:
 *
 *   REFUSE_CALL   open read write fsync rename mkdir stat unlink rmdir list
 *   REFUSE_FILE   a pattern of the path, as of fnmatch
 *   REFUSE_HOW    a number of errno; short; or the milliseconds of a delay, as ms10000
 *   REFUSE_LOG    a file that gets a byte for each refusal; REFUSE_TIMES of them are made, 0: every one
 *
 * With REFUSE_CALL all none is refused, and the log gets a line for each call on such a path or on a relative one: its name and the path.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static const char *path_of(int descriptor, char *room) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, room, 4095);
  room[length < 0 ? 0 : length] = 0;
  return room;
}

/* 0: goes on; 1: is refused, with errno; 2: is to be short. */
static int refuses(const char *call, const char *path) {
  const char *wanted = getenv("REFUSE_CALL"), *file = getenv("REFUSE_FILE"), *how = getenv("REFUSE_HOW");
  const char *log = getenv("REFUSE_LOG"), *times = getenv("REFUSE_TIMES");
  if (!wanted || !file || !how || !log || !path) return 0;
  int is_recorded = !strcmp(wanted, "all");
  if (is_recorded ? *path == '/' && fnmatch(file, path, 0) : strcmp(wanted, call) || fnmatch(file, path, 0)) return 0;
  int descriptor = syscall(SYS_openat, AT_FDCWD, log, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (is_recorded) {
    char line[4200];
    syscall(SYS_write, descriptor, line, snprintf(line, sizeof line, "%s %.4095s\n", call, path));
    syscall(SYS_close, descriptor);
    return 0;
  }
  long most = times ? atol(times) : 0, made = syscall(SYS_lseek, descriptor, 0, SEEK_END);
  int is_left = !most || made < most;
  if (is_left) syscall(SYS_write, descriptor, "x", 1);
  syscall(SYS_close, descriptor);
  if (!is_left) return 0;
  if (!strcmp(how, "short")) return 2;
  if (!strncmp(how, "ms", 2)) {
    long milliseconds = atol(how + 2);
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&pause, NULL);
    return 0;
  }
  errno = atoi(how);
  return 1;
}

static int refuses_descriptor(const char *call, int descriptor) {
  char room[4096];
  const char *wanted = getenv("REFUSE_CALL");
  if (!wanted || (strcmp(wanted, "all") && strcmp(wanted, call))) return 0;
  return refuses(call, path_of(descriptor, room));
}

#define OPENS(name, ...)                                                   \
  {                                                                        \
    NEXT(name);                                                            \
    mode_t mode = 0;                                                       \
    if (flags & (O_CREAT | O_TMPFILE)) {                                   \
      va_list rest;                                                        \
      va_start(rest, flags);                                               \
      mode = va_arg(rest, mode_t);                                         \
      va_end(rest);                                                        \
    }                                                                      \
    return refuses("open", path) == 1 ? -1 : next(__VA_ARGS__, flags, mode); \
  }
int open(const char *path, int flags, ...) OPENS(open, path)
int open64(const char *path, int flags, ...) OPENS(open64, path)
int openat(int at, const char *path, int flags, ...) OPENS(openat, at, path)
int openat64(int at, const char *path, int flags, ...) OPENS(openat64, at, path)

#define MOVES(type, name, call, ...)                                                   \
  {                                                                                    \
    NEXT(name);                                                                        \
    int refused = refuses_descriptor(call, descriptor);                                \
    if (refused == 2 && size > 1) size = size / 2;                                     \
    return refused == 1 ? -1 : next(descriptor, buffer, size __VA_ARGS__);             \
  }
ssize_t read(int descriptor, void *buffer, size_t size) MOVES(void, read, "read")
ssize_t pread(int descriptor, void *buffer, size_t size, off_t at) MOVES(void, pread, "read", , at)
ssize_t pread64(int descriptor, void *buffer, size_t size, off64_t at) MOVES(void, pread64, "read", , at)
ssize_t write(int descriptor, const void *buffer, size_t size) MOVES(const void, write, "write")
ssize_t pwrite(int descriptor, const void *buffer, size_t size, off_t at) MOVES(const void, pwrite, "write", , at)
ssize_t pwrite64(int descriptor, const void *buffer, size_t size, off64_t at) MOVES(const void, pwrite64, "write", , at)

#define OF_DESCRIPTOR(name, call) { NEXT(name); return refuses_descriptor(call, descriptor) == 1 ? -1 : next(descriptor); }
int fsync(int descriptor) OF_DESCRIPTOR(fsync, "fsync")
int fdatasync(int descriptor) OF_DESCRIPTOR(fdatasync, "fsync")

#define OF_PATH(name, call, ...) { NEXT(name); return refuses(call, path) == 1 ? -1 : next(__VA_ARGS__); }
int rename(const char *path, const char *to) OF_PATH(rename, "rename", path, to)
int renameat(int at, const char *path, int to_at, const char *to) OF_PATH(renameat, "rename", at, path, to_at, to)
int mkdir(const char *path, mode_t mode) OF_PATH(mkdir, "mkdir", path, mode)
int mkdirat(int at, const char *path, mode_t mode) OF_PATH(mkdirat, "mkdir", at, path, mode)
int unlink(const char *path) OF_PATH(unlink, "unlink", path)
int unlinkat(int at, const char *path, int flags) OF_PATH(unlinkat, "unlink", at, path, flags)
int rmdir(const char *path) OF_PATH(rmdir, "rmdir", path)
int stat(const char *path, struct stat *to) OF_PATH(stat, "stat", path, to)
int stat64(const char *path, struct stat64 *to) OF_PATH(stat64, "stat", path, to)
int lstat(const char *path, struct stat *to) OF_PATH(lstat, "stat", path, to)
int lstat64(const char *path, struct stat64 *to) OF_PATH(lstat64, "stat", path, to)
int fstatat(int at, const char *path, struct stat *to, int flags) OF_PATH(fstatat, "stat", at, path, to, flags)
int fstatat64(int at, const char *path, struct stat64 *to, int flags) OF_PATH(fstatat64, "stat", at, path, to, flags)
DIR *opendir(const char *path) { NEXT(opendir); return refuses("list", path) == 1 ? NULL : next(path); }
