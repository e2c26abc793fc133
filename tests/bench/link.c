/*
 * Links with a rate, a delay and losses between network namespaces: link DELAY_US LOSS_PPM SEED RATE NAMESPACE...
 *
 * Every namespace (a path below /run/netns) gets a TUN device "link0"; node i (from 0) has the address 10.77.0.(i + 1).
 * A packet waits for its turn on its sender's uplink (RATE bits a second), is lost with a probability of LOSS_PPM
 * millionths, travels for DELAY_US microseconds and waits for its turn on its receiver's downlink (the same RATE).
 * Both queues drop what would wait for longer than QUEUE_NS; at the lowest rates they hold QUEUE_PACKETS all the same.
 * The kernel hands over bundles of TCP segments (TSO); each segment of one is a packet here, lost or not by itself, and
 * those that go on without a gap are handed to the receiver as a bundle, as a network card does (GRO).
 *
 * It says "ready" and takes lines on standard input: "rate NODE BITS", "loss PPM", "sent" (answered with the bytes that
 * each uplink has carried); it ends with its standard input.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_NODES 64
#define LARGEST 65536
#define MOST 262144 /* packets on their way */
#define QUEUE_NS 100000000LL
#define QUEUE_PACKETS 64
#define TICK_NS 500000LL /* the shortest sleep: packets that fall due within it leave together */

struct packet {
    int64_t due;
    int to, bytes, count, length, arrived; /* bytes of so many wire packets; arrived: it is in the downlink's queue */
    unsigned char data[]; /* the header of virtio_net.h, and the packet */
};
struct link {
    int64_t free; /* when all that is in its queue has left it */
    int64_t bits;
    int64_t carried;
};

static struct packet **heap;
static int heaped, nodes, device[MAX_NODES];
static struct link up[MAX_NODES], down[MAX_NODES];
static int64_t delay_ns, loss_ppm;
static uint64_t chance;

static void fail(const char *what) {
    fprintf(stderr, "link: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static uint64_t drawn(void) { /* xorshift64* */
    chance ^= chance >> 12;
    chance ^= chance << 25;
    chance ^= chance >> 27;
    return chance * 2685821657736338717ULL;
}

static void push(struct packet *p) {
    int i = heaped++;
    for (; i > 0 && heap[(i - 1) / 2]->due > p->due; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = p;
}

static struct packet *pop(void) {
    struct packet *first = heap[0], *last = heap[--heaped];
    int i = 0;
    for (int child; (child = 2 * i + 1) < heaped; i = child) {
        if (child + 1 < heaped && heap[child + 1]->due < heap[child]->due) child++;
        if (heap[child]->due >= last->due) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}

/* Take a turn on a link: when all bytes have left it, or -1 where the queue is full. */
static int64_t turn(struct link *l, int64_t at, int bytes, int count) {
    int64_t takes = bytes * 8000000000LL / l->bits, waits = l->free > at ? l->free - at : 0;
    if (waits > QUEUE_NS && waits > QUEUE_PACKETS * takes / count) return -1;
    l->free = at + waits + takes;
    l->carried += bytes;
    return l->free;
}

static void put16(unsigned char *at, int value) { at[0] = (unsigned char)(value >> 8), at[1] = (unsigned char)value; }

/* Send on segments first..end of a packet that has `head` bytes of headers; one that is no bundle is one segment. */
static void send_on(const unsigned char *data, int length, int head, int first, int end, int to, int64_t left) {
    struct virtio_net_hdr bundle;
    memcpy(&bundle, data, sizeof bundle);
    int size = bundle.gso_type ? bundle.gso_size : length, start = first * size;
    int payload = (end * size < length - head ? end * size : length - head) - start, count = end - first;
    struct packet *p = malloc(sizeof *p + sizeof bundle + head + payload);
    if (!p) fail("memory");
    unsigned char *ip = p->data + sizeof bundle, *tcp = ip + (data[sizeof bundle] & 15) * 4;
    memcpy(ip, data + sizeof bundle, head);
    memcpy(ip + head, data + sizeof bundle + head + start, payload);
    if (bundle.gso_type) {
        uint32_t number, sum = 0;
        memcpy(&number, tcp + 4, 4);
        number = htonl(ntohl(number) + start);
        memcpy(tcp + 4, &number, 4);
        if (start + payload < length - head) tcp[13] &= ~0x09; /* FIN and PSH belong to the last segment */
        put16(ip + 2, head + payload);
        put16(ip + 4, (ip[4] << 8 | ip[5]) + first);
        put16(ip + 10, 0);
        for (int i = 0; i < tcp - ip; i += 2) sum += ip[i] << 8 | ip[i + 1];
        while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
        put16(ip + 10, ~sum);
        if (count == 1) bundle.gso_type = bundle.gso_size = 0;
    }
    memcpy(p->data, &bundle, sizeof bundle);
    p->due = left + delay_ns, p->to = to, p->arrived = 0, p->count = count;
    p->bytes = payload + count * head, p->length = (int)sizeof bundle + head + payload;
    push(p);
}

static void take(int from, int64_t now) {
    static unsigned char data[sizeof(struct virtio_net_hdr) + LARGEST];
    const unsigned char *ip = data + sizeof(struct virtio_net_hdr);
    while (heaped < MOST) {
        struct virtio_net_hdr bundle;
        int length = (int)read(device[from], data, sizeof data) - (int)sizeof bundle;
        if (length < 0) return;
        if (length < 20 || ip[0] >> 4 != 4 || memcmp(ip + 16, "\x0a\x4d\x00", 3)) continue;
        int to = ip[19] - 1, head = 0, count = 1, size = length;
        if (to < 0 || to >= nodes) continue;
        memcpy(&bundle, data, sizeof bundle);
        if (bundle.gso_type) {
            head = (ip[0] & 15) * 4;
            head += (ip[head + 12] >> 4) * 4;
            size = bundle.gso_size, count = (length - head + size - 1) / size;
        }
        for (int first = 0, end; first < count; first = end + 1) {
            int64_t left = 0;
            /* As many as get through; the one behind them is lost, but has its turn as well. */
            for (end = first; end < count && (int64_t)(drawn() % 1000000) >= loss_ppm; end++) {}
            if (end > first) {
                int payload = (end * size < length - head ? end * size : length - head) - first * size;
                left = turn(&up[from], now, payload + (end - first) * head, end - first);
                if (left >= 0) send_on(data, length, head, first, end, to, left);
            }
            if (end < count) turn(&up[from], now, size + head, 1);
        }
    }
}

static void deliver(int64_t now) {
    while (heaped && heap[0]->due <= now) {
        struct packet *p = pop();
        if (!p->arrived) {
            int64_t left = turn(&down[p->to], p->due, p->bytes, p->count);
            if (left >= 0) {
                p->arrived = 1, p->due = left;
                push(p);
                continue;
            }
        } else if (write(device[p->to], p->data, p->length) < 0 && errno != EAGAIN && errno != EIO) {
            fail("a packet was refused"); /* EIO: the device is down */
        }
        free(p);
    }
}

static int obey(void) {
    char line[128];
    int node;
    long long value;
    if (!fgets(line, sizeof line, stdin)) return 0;
    if (sscanf(line, "rate %d %lld", &node, &value) == 2 && node >= 0 && node < nodes && value > 0) {
        up[node].bits = down[node].bits = value;
        up[node].free = down[node].free = 0;
    } else if (sscanf(line, "loss %lld", &value) == 1) {
        loss_ppm = value;
    } else if (!strcmp(line, "sent\n")) {
        printf("sent");
        for (int i = 0; i < nodes; i++) printf(" %lld", (long long)up[i].carried);
        printf("\n");
        fflush(stdout);
    }
    return 1;
}

static int tun(const char *path) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    int space = open(path, O_RDONLY | O_CLOEXEC), fd;
    if (space < 0 || setns(space, CLONE_NEWNET)) fail(path);
    close(space);
    fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    strcpy(request.ifr_name, "link0");
    if (ioctl(fd, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
    return fd;
}

int main(int count, char **words) {
    if (count < 6 || count - 5 > MAX_NODES) return 2;
    delay_ns = atoll(words[1]) * 1000, loss_ppm = atoll(words[2]), chance = strtoull(words[3], 0, 10) | 1;
    nodes = count - 5;
    struct pollfd waits[MAX_NODES + 1] = {{.fd = 0, .events = POLLIN}};
    for (int i = 0; i < nodes; i++) {
        up[i].bits = down[i].bits = atoll(words[4]);
        device[i] = tun(words[5 + i]);
        waits[i + 1] = (struct pollfd){.fd = device[i], .events = POLLIN};
    }
    heap = calloc(MOST + LARGEST, sizeof *heap);
    if (!heap) fail("memory");
    setvbuf(stdin, 0, _IONBF, 0);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t now = now_ns();
        deliver(now);
        struct timespec rest = {3600, 0};
        if (heaped) {
            int64_t sleep = heap[0]->due - now;
            if (sleep < TICK_NS) sleep = TICK_NS;
            rest = (struct timespec){sleep / 1000000000, sleep % 1000000000};
        }
        if (ppoll(waits, nodes + 1, &rest, 0) < 0 && errno != EINTR) fail("ppoll");
        if (waits[0].revents && !obey()) return 0;
        now = now_ns();
        for (int i = 0; i < nodes; i++)
            if (waits[i + 1].revents) take(i, now);
    }
}
