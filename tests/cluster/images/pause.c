/* Process of a pod's sandbox: reaps orphans, and exits on SIGTERM or SIGINT. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void on_signal(int signal) {
    if (signal != SIGCHLD) _exit(0);
    while (waitpid(-1, 0, WNOHANG) > 0) {
    }
}

int main(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGTERM, &action, 0);
    sigaction(SIGINT, &action, 0);
    sigaction(SIGCHLD, &action, 0);
    for (;;) pause();
}
