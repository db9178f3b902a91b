//! Tests of ranks on separate hosts, simulated by network namespaces: cut links, stalled, late and
//! slow ranks, strangers, and other attempts. They require root.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use stoker_test_cluster::has_root;

use crate::gang::{Gang, codes, start, to_the_end};
use crate::process::{ProcessOutcome, until};
use crate::training::{ENV_MARK, ENV_PACE, ENV_SIGNAL};

/// Hosts connected by a bridge. Rank 0 runs on this host, like its runner.
struct Network {
    id: u32,
    num_hosts: u32,
}

impl Network {
    /// Creates hosts 1 to `num_hosts`. Without root, returns `None` and records the calling test as
    /// skipped.
    #[track_caller]
    fn new(num_hosts: u32) -> Option<Self> {
        if !has_root("network namespaces") {
            return None;
        }
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = std::process::id() % 10_000 * 10 + NEXT.fetch_add(1, Ordering::Relaxed);
        let network = Self { id, num_hosts };
        let bridge = network.bridge();
        run(&format!("ip link add {bridge} type bridge"));
        run(&format!("ip addr add {}/24 dev {bridge}", network.address(254)));
        run(&format!("ip link set {bridge} up"));
        for host in 1..=num_hosts {
            let (name, link) = (network.host(host), network.link(host));
            run(&format!("ip netns add {name}"));
            run(&format!("ip link add {link} type veth peer name eth0 netns {name}"));
            run(&format!("ip link set {link} master {bridge} up"));
            let address = network.address(host);
            run(&format!("ip -n {name} addr add {address}/24 dev eth0"));
            run(&format!("ip -n {name} link set eth0 up"));
            run(&format!("ip -n {name} link set lo up"));
        }
        Some(network)
    }

    fn bridge(&self) -> String {
        format!("sb{}", self.id)
    }

    fn host(&self, host: u32) -> String {
        format!("stoker-{}-{host}", self.id)
    }

    fn link(&self, host: u32) -> String {
        format!("sv{}-{host}", self.id)
    }

    fn address(&self, host: u32) -> String {
        format!("10.{}.{}.{host}", 100 + self.id / 250 % 100, self.id % 250)
    }

    fn cut(&self, host: u32) {
        run(&format!("ip link set {} down", self.link(host)));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 1..=self.num_hosts {
            let _ = Command::new("ip").args(["netns", "del", &self.host(host)]).status();
        }
        let _ = Command::new("ip").args(["link", "del", &self.bridge()]).status();
    }
}

fn run(words: &str) {
    let mut all = words.split(' ');
    let output = Command::new(all.next().unwrap()).args(all).output();
    let output = output.unwrap_or_else(|error| panic!("{words}: {error}; install iproute2"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}: {errors}");
}

/// Creates a gang of three ranks on three hosts. It trains 20 batches of 0.2 s, with a limit of 6 s
/// without progress. The limit is longer than a thread waits for a core on a busy machine.
fn gang(network: &Network) -> Gang {
    let mut gang = Gang::new(3, to_the_end)
        .env("STOKER_SILENCE_SECONDS", "6")
        .env("STOKER_SILENCE_STEPS", "0")
        .env("STOKER_RENDEZVOUS_SECONDS", "120")
        .env(ENV_PACE, "0 200");
    let port = gang.pods[0].config["gang"]["rendezvous"].as_str().unwrap().to_owned();
    let port = port.rsplit_once(':').unwrap().1.to_owned();
    for (rank, pod) in gang.pods.iter_mut().enumerate() {
        pod.config["gang"]["rendezvous"] = json!(format!("{}:{port}", network.address(254)));
        if rank > 0 {
            pod.host = Some(network.host(rank as u32));
        }
    }
    gang
}

fn start_all(gang: &Gang) -> Vec<Child> {
    gang.pods.iter().map(start).collect()
}

fn message(left: &ProcessOutcome) -> String {
    left.termination.as_ref().and_then(|words| words.message.clone()).unwrap_or_default()
}

/// Waits until rank 0 has trained some batches.
fn under_way(gang: &Gang) {
    let mark = gang.pods[0].file("mark");
    until("training is under way", || mark.exists());
}

fn marked(gang: Gang) -> Gang {
    let mark = gang.pods[0].file("mark").display().to_string();
    gang.env(ENV_MARK, &format!("0 3 {mark}"))
}

/// Stalls do not end this gang.
fn patient(gang: Gang) -> Gang {
    gang.env("STOKER_SILENCE_SECONDS", "120")
}

#[test]
fn cut_link_ends_the_gang_on_both_sides() {
    let Some(network) = Network::new(2) else { return };
    // Training takes 8 s after the mark, in which the link is cut.
    let gang = marked(gang(&network)).env(ENV_PACE, "0 500");
    let children = start_all(&gang);
    under_way(&gang);
    network.cut(2);
    let begin = Instant::now();
    let left = gang.wait(children);
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    let reason = message(&left[0]);
    let expected = "no heartbeat from rank 2 for 6 s: last seen at step ";
    assert!(reason.contains(expected), "{left:#?}");
    let reason = message(&left[2]);
    let expected = "no heartbeat from rank 0 for 11 s: last seen at step ";
    assert!(reason.contains(expected), "{left:#?}");
    assert_eq!((codes(&left)[0], codes(&left)[2]), (80, 80), "{left:#?}");
    assert!([80, 81].contains(&left[1].code), "{left:#?}");
}

#[test]
fn paused_rank_is_named_and_others_end() {
    let Some(network) = Network::new(2) else { return };
    let gang = marked(gang(&network)).env(ENV_SIGNAL, "1 12 STOP");
    let mut children = start_all(&gang);
    under_way(&gang);
    let begin = Instant::now();
    let stopped = children.remove(1);
    let last = gang.pods[2].wait(children.remove(1));
    let first = gang.pods[0].wait(children.remove(0));
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    assert_eq!(first.code, 80, "{first:?}");
    let reason = message(&first);
    let expected = "no heartbeat from rank 1 for 6 s: last seen at step ";
    assert!(reason.contains(expected), "{reason}");
    assert!([80, 81].contains(&last.code), "{last:?}");
    // Kill the pod, as the kubelet does.
    let parent = stopped.id().to_string();
    run(&format!("pkill -KILL -P {parent}"));
    assert_eq!(gang.pods[1].wait(stopped).code, 137);
}

#[test]
fn hanging_rank_is_named_and_exits() {
    let Some(network) = Network::new(2) else { return };
    let gang = marked(gang(&network)).env(ENV_SIGNAL, "1 12 HANG");
    let children = start_all(&gang);
    under_way(&gang);
    let begin = Instant::now();
    let left = gang.wait(children);
    assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", begin.elapsed());
    let reason = message(&left[0]);
    let expected = "no progress for 6 s: rank 1 last seen at step 11 after 2 collective calls";
    assert!(reason.contains(expected), "{reason}");
    assert_eq!(codes(&left)[0], 80, "{left:#?}");
    assert!(left[1..].iter().all(|rank| [80, 81].contains(&rank.code)), "{left:#?}");
    assert!(message(&left[1]).contains("this rank did not react"), "{left:#?}");
}

#[test]
fn remote_kill_ends_the_others_at_once() {
    let Some(network) = Network::new(2) else { return };
    let gang = patient(marked(gang(&network))).env(ENV_SIGNAL, "1 7 KILL");
    let children = start_all(&gang);
    under_way(&gang);
    let begin = Instant::now();
    let left = gang.wait(children);
    assert_eq!(codes(&left), [81, 137, 81], "{left:#?}");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn late_ranks_connect_despite_strangers() {
    let Some(network) = Network::new(2) else { return };
    // A stranger on another host connects to rank 0's port all the time.
    let gang = patient(gang(&network)).env(ENV_PACE, "1 400");
    let address = gang.pods[0].config["gang"]["rendezvous"].as_str().unwrap().replace(':', "/");
    let noise = format!(
        "while true; do head -c 100000 /dev/urandom > /dev/tcp/{address}; sleep 0.05; done 2>&-"
    );
    let mut stranger = Command::new("ip");
    stranger.args(["netns", "exec", &network.host(2), "bash", "-c", &noise]);
    let mut stranger = stranger.spawn().unwrap();
    let mut children = vec![start(&gang.pods[0]), start(&gang.pods[1])];
    std::thread::sleep(Duration::from_secs(4));
    children.push(start(&gang.pods[2]));
    let left = gang.wait(children);
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert_eq!(codes(&left), [0, 0, 0], "{left:#?}");
}

/// Waits until this number of hosts have tried to connect to rank 0, which is not started yet.
fn wait_for_attempts(gang: &Gang, num_hosts: usize) {
    let address = gang.pods[0].config["gang"]["rendezvous"].as_str().unwrap();
    let listener = TcpListener::bind(address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let hosts = RefCell::new(BTreeSet::new());
    until("the first attempts to connect", || {
        if let Ok((_, host)) = listener.accept() {
            hosts.borrow_mut().insert(host.ip());
        }
        hosts.borrow().len() == num_hosts
    });
}

#[test]
fn rank_of_another_attempt_is_refused() {
    let Some(network) = Network::new(2) else { return };
    let mut gang = gang(&network);
    // Rank 0 waits this long for rank 2. The other ranks retry every 0.25 s by then.
    let first = gang.pods.remove(0).env("STOKER_RENDEZVOUS_SECONDS", "10");
    gang.pods.insert(0, first);
    gang.pods[2].config["attempt"] = json!(9);
    let mut children: Vec<Child> = gang.pods[1..].iter().map(start).collect();
    wait_for_attempts(&gang, 2);
    children.insert(0, start(&gang.pods[0]));
    let left = gang.wait(children);
    assert_eq!(codes(&left), [80, 80, 80], "{left:#?}");
    let reason = message(&left[2]);
    let expected = "rank 2: rank 0 belongs to attempt 3 with 3 ranks, but the connecting rank 2 \
                    belongs to attempt 9 with 3 ranks";
    assert_eq!(reason, expected);
    let reason = message(&left[0]);
    assert!(reason.contains("of 3 ranks, 2 did not connect to "), "{reason}");
}
