"""The system calls that confined programs may make, as filters of seccomp: all others fail.

There are two: of a program that only computes, and of programs with processes and sockets, as a shell starts them.

The table has name:number on x86-64:number on ARM64, as in the kernel's asm/unistd.h; "-" where a machine lacks the call. Arguments are
checked where they decide the effect of a call. A program that computes requests no signal at another's write to a pipe (fcntl F_SETOWN,
F_SETSIG, O_ASYNC), changes no limits, and signals itself only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Collection, Mapping, Sequence

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, number in linux/audit.h
_X32 = 0x40000000  # x86-64 takes a second set of numbers, which begins there

_FREE = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 preadv2:327:286
    pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
    sendfile:40:71 copy_file_range:326:285 open:2:- openat:257:56 creat:85:- stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79
    statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78 getdents:78:- getdents64:217:61
    getcwd:79:17 chdir:80:49 fchdir:81:50 statfs:137:43 fstatfs:138:44 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:-
    unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36
    umask:95:166 ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83 flock:73:32 fadvise64:221:223 mmap:9:222
    mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227 mincore:27:232 membarrier:324:283
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
    rt_sigtimedwait:128:137 sigaltstack:131:132 pause:34:- alarm:37:- getitimer:36:102 setitimer:38:103 restart_syscall:219:128
    poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
    epoll_pwait:281:22 eventfd:284:- eventfd2:290:19 recvfrom:45:207 recvmsg:47:212 shutdown:48:210 getsockname:51:204
    getpeername:52:205 getsockopt:55:209 setsockopt:54:208 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
    nanosleep:35:101 gettimeofday:96:169 time:201:- times:100:153 getrusage:98:165 futex:202:98 futex_waitv:449:449
    set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 sched_yield:24:124 sched_getaffinity:204:123 getcpu:309:168
    getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158
    getresuid:118:148 getresgid:120:150 getpgrp:111:- getpgid:121:155 getsid:124:156 getrlimit:97:163 getpriority:140:141
    uname:63:160 sysinfo:99:179 getrandom:318:278 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
"""
_OF_FILES = """
    chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132:- utimes:235:- utimensat:280:88 futimesat:261:-
    truncate:76:45
"""
_CHECKED = """
    fcntl:72:25 ioctl:16:29 prlimit64:302:261 prctl:157:167 kill:62:129 tgkill:234:131 socketpair:53:199 sendto:44:206
"""
_OF_PROGRAMS = """
    fcntl:72:25 prctl:157:167 prlimit64:302:261 setrlimit:160:164 kill:62:129 tgkill:234:131 tkill:200:130 rt_sigqueueinfo:129:138
    rt_tgsigqueueinfo:297:240 pidfd_open:434:434 pidfd_send_signal:424:424 fork:57:- vfork:58:- execve:59:221 execveat:322:281
    set_tid_address:218:96 arch_prctl:158:- setsid:112:157 setpgid:109:154 setuid:105:146 setgid:106:144 setreuid:113:145
    setregid:114:143 setresuid:117:147 setresgid:119:149 setfsuid:122:151 setfsgid:123:152 capget:125:90 setpriority:141:140
    sched_setparam:142:118 sched_getparam:143:121 sched_setscheduler:144:119 sched_getscheduler:145:120 sched_get_priority_max:146:125
    sched_get_priority_min:147:126 sched_rr_get_interval:148:127 sched_setaffinity:203:122 sched_setattr:314:274 sched_getattr:315:275
    ioprio_set:251:30 ioprio_get:252:31 connect:42:203 accept:43:202 accept4:288:242 bind:49:200 listen:50:201 sendto:44:206
    sendmsg:46:211 sendmmsg:307:269 recvmmsg:299:243 signalfd:282:- signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86
    timerfd_gettime:287:87 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
    timer_delete:226:111 inotify_init:253:- inotify_init1:294:26 inotify_add_watch:254:27 inotify_rm_watch:255:28 epoll_pwait2:441:441
    openat2:437:437 mknod:133:- mknodat:259:33 sync:162:81 syncfs:306:267 sync_file_range:277:84 readahead:187:213 splice:275:76
    tee:276:77 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10
    listxattr:194:11 llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16 mlock:149:228
    munlock:150:229 mlock2:325:284 pkey_mprotect:329:288 pkey_alloc:330:289 pkey_free:331:290 get_mempolicy:239:236
"""
_CHECKED_OF_PROGRAMS = """
    ioctl:16:29 clone:56:220 socket:41:198 socketpair:53:199
"""
_OWNERS = """
    chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 setgroups:116:159
"""
"""Calls that installers make as root, for ids that a namespace of one user lacks: they do nothing and succeed, as in
R. Priedhorsky et al., Zero-consistency root emulation for unprivileged container image build, 2024."""

_FCNTL = (
    0,
    1,
    2,
    3,
    5,
    6,
    7,
    36,
    37,
    38,
    1030,
    1032,
)  # copies and flags of descriptors, flags of files, locks, the size of a pipe
_F_SETFL, _O_ASYNC = 4, 0x2000
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTL = (15, 16, 0x53564D41)  # the name of a thread, the name of memory
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10  # others, such as AF_VSOCK, are not of the namespace
_NEW_NAMESPACES = 0x7E020000
_SOCKET, _BUFFERS = 1, (7, 8)  # SOL_SOCKET, SO_SNDBUF and SO_RCVBUF: what they have is memory of no process
_INPUT_OF_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_NEWEST = 424  # from here on machines have the same numbers, and programs do without a call that is not there

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _DO_NOTHING = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE, _NOT_THERE = _DO_NOTHING | errno.EPERM, _DO_NOTHING | errno.ENOSYS
# useradd and su go on without a kernel's log, but not where it is refused
_NO_FAMILY = _DO_NOTHING | errno.EAFNOSUPPORT
_SECCOMP, _GET_SECCOMP, _FILTER = 22, 21, 2

_Line = tuple[int, int, int, int]
_libc = ctypes.CDLL(None, use_errno=True)


def available() -> bool:
    """Return whether this kernel has seccomp, and this machine a table."""
    return platform.machine() in _MACHINES and _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0


def refuse_all_others(*, attributes: bool) -> None:
    """Let this process make these system calls only, for good; no_new_privs must be set.

    Args:
        attributes: whether it may change the mode, times and length of files by their names, which Landlock does not ask about.

    Raises:
        OSError: the kernel takes no filter.
    """
    column, _ = _MACHINES[platform.machine()]
    free = _numbers(_FREE + (_OF_FILES if attributes else ""), column)
    _install([*_allowed(free, _checks(_numbers(_CHECKED, column), os.getpid())), (_RETURN, 0, 0, _REFUSE)])


def refuse_dangerous() -> None:
    """Let this process, and what it starts, make the system calls of ordinary programs only, for good; no_new_privs must be set.

    Refused are other namespaces, mounts, tracing, keys, memory without a name or in a pipe (vmsplice), and sockets of families that namespaces
    do not separate. The buffers of sockets keep the size that they begin with.

    Raises:
        OSError: the kernel takes no filter.
    """
    column, _ = _MACHINES[platform.machine()]
    number = _numbers(_CHECKED_OF_PROGRAMS, column)
    checks = {
        number["ioctl"]: _none_of(1, _INPUT_OF_TERMINAL),
        number["clone"]: [(_LOAD, 0, 0, _low(0)), (_ANY_BIT, 1, 0, _NEW_NAMESPACES), (_RETURN, 0, 0, _ALLOW)],
        number["socket"]: [*_one_of(0, (_AF_UNIX, _AF_INET, _AF_INET6)), (_RETURN, 0, 0, _NO_FAMILY)],
        number["socketpair"]: _one_of(0, [_AF_UNIX]),
    }
    free = _numbers(_FREE + _OF_FILES + _OF_PROGRAMS, column)
    checks[free.pop("setsockopt")] = [
        (_LOAD, 0, 0, _low(1)),
        (_EQUAL, 1, 0, _SOCKET),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _low(2)),
        (_EQUAL, 1, 0, _BUFFERS[0]),
        (_EQUAL, 0, 1, _BUFFERS[1]),
        (_RETURN, 0, 0, _DO_NOTHING),
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines = _allowed(free, checks)
    for each in _numbers(_OWNERS, column).values():
        lines += [(_EQUAL, 0, 1, each), (_RETURN, 0, 0, _DO_NOTHING)]
    _install([*lines, (_AT_LEAST, 0, 1, _NEWEST), (_RETURN, 0, 0, _NOT_THERE), (_RETURN, 0, 0, _REFUSE)])


def _allowed(free: Mapping[str, int], checks: Mapping[int, Sequence[_Line]]) -> list[_Line]:
    """Return the lines that allow calls, those of `checks` where their arguments are right; the number is loaded after them."""
    _, machine = _MACHINES[platform.machine()]
    lines = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in free.values():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, check in checks.items():
        lines += [(_EQUAL, 0, len(check) + 1, number), *check, (_RETURN, 0, 0, _REFUSE)]
    return lines


def _numbers(table: str, column: int) -> dict[str, int]:
    entries = (entry.split(":") for entry in table.split())
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}


def _checks(number: Mapping[str, int], own: int) -> dict[int, Sequence[_Line]]:
    """Return what is asked about the arguments of each call: lines that allow it, or come to their end."""
    set_flags = [(_LOAD, 0, 0, _low(1)), (_EQUAL, 0, 3, _F_SETFL), (_LOAD, 0, 0, _low(2)), (_ANY_BIT, 1, 0, _O_ASYNC)]
    return {
        number["fcntl"]: [*_one_of(1, _FCNTL), *set_flags, (_RETURN, 0, 0, _ALLOW)],
        number["ioctl"]: _one_of(1, _IOCTL),
        number["prctl"]: _one_of(0, _PRCTL),
        number["prlimit64"]: _zero(2),  # new limits
        number["kill"]: _one_of(0, [own]),
        number["tgkill"]: _one_of(0, [own]),
        number["socketpair"]: _one_of(0, [_AF_UNIX]),
        number["sendto"]: _zero(4),  # the address of somebody else
    }


def _low(argument: int) -> int:
    """Return where the lower half of an argument is in struct seccomp_data; both machines have it first."""
    return 16 + 8 * argument


def _one_of(argument: int, values: Collection[int]) -> list[_Line]:
    lines: list[_Line] = [(_LOAD, 0, 0, _low(argument))]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return lines


def _none_of(argument: int, values: Collection[int]) -> list[_Line]:
    lines: list[_Line] = [(_LOAD, 0, 0, _low(argument))]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _zero(argument: int) -> list[_Line]:
    low = _low(argument)
    return [(_LOAD, 0, 0, low), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, low + 4), (_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW)]


def _install(lines: Sequence[_Line]) -> None:
    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("start", ctypes.POINTER(Instruction))]

    whole = Program(len(lines), (Instruction * len(lines))(*(Instruction(*line) for line in lines)))
    if _libc.prctl(_SECCOMP, _FILTER, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
