//! Test of the cluster with nodes. A single test, because only one such cluster can run on a
//! machine, and its start takes 15 s.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, nodes_enabled, wait_until};

/// Returns a pod of the test image that runs a shell script, with the security context of trials.
fn pod(name: &str, node: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { "app": "gang" } },
        "spec": {
            "hostname": name,
            "subdomain": "gang",
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": 65532,
                "fsGroup": 65532,
                "seccompProfile": { "type": "RuntimeDefault" },
            },
            "containers": [{
                "name": "c",
                "image": "localhost/test:1",
                "imagePullPolicy": "Never",
                "command": ["sh", "-ec", script],
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": { "drop": ["ALL"] },
                },
                "volumeMounts": [{ "name": "tmp", "mountPath": "/tmp" }],
            }],
            "volumes": [{ "name": "tmp", "emptyDir": {} }],
        },
    })
}

fn wait_for_phase(cluster: &Cluster, name: &str, phase: &str) {
    let what = format!("{name} is {phase}");
    let waited = cluster.watch_until(&what, &["pod", name], |pod| {
        let seen = pod["status"]["phase"].as_str().unwrap_or_default();
        assert!(seen == phase || seen != "Failed", "{name} failed: {}", logs(cluster, name));
        if seen == phase { Ok(()) } else { Err(pod["status"].to_string()) }
    });
    waited.unwrap();
}

fn logs(cluster: &Cluster, name: &str) -> String {
    cluster.kubectl(&["logs", name]).unwrap_or_else(|error| error.to_string())
}

/// Runs a pod until it has succeeded, and returns its log.
fn run(cluster: &Cluster, pod: &Value) -> String {
    let name = pod["metadata"]["name"].as_str().unwrap();
    cluster.apply(&pod.to_string()).unwrap();
    wait_for_phase(cluster, name, "Succeeded");
    logs(cluster, name)
}

#[test]
fn two_node_cluster_works() {
    if !nodes_enabled() {
        return;
    }
    let start = Instant::now();
    let cluster = Cluster::two_nodes().unwrap();
    println!("two nodes ready in {:?}", start.elapsed());
    for (name, part) in [
        ("names", pods_find_each_other_by_name as fn(&Cluster)),
        ("s3", objects_are_stored_in_s3),
        ("ports", ports_are_forwarded_and_exposed),
        ("gpus", gpus_are_allocated),
        ("node", killed_node_restarts),
    ] {
        let start = Instant::now();
        part(&cluster);
        println!("{name}: {:?}", start.elapsed());
    }
    let folder = cluster.folder().to_path_buf();
    let start = Instant::now();
    drop(cluster);
    println!("all ended in {:?}", start.elapsed());
    assert!(!folder.exists());
    assert!(!std::path::Path::new("/run/netns/stoker-cp").exists());
}

fn pods_find_each_other_by_name(cluster: &Cluster) {
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "gang" },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": { "app": "gang" },
        },
    });
    cluster.apply(&service.to_string()).unwrap();
    let start = Instant::now();
    cluster.apply(&pod("rank-0", "node-1", "echo up; exec sleep 1000").to_string()).unwrap();
    wait_for_phase(cluster, "rank-0", "Running");
    println!("a pod runs in {:?}", start.elapsed());
    let address = cluster.get(&["pod", "rank-0"]).unwrap()["status"]["podIP"].clone();

    let script =
        "for try in $(seq 50); do getent hosts rank-0.gang && exit; sleep 0.2; done; exit 1";
    let script = script.replace("$(seq 50)", "{1..50}");
    let start = Instant::now();
    let found = run(cluster, &pod("rank-1", "node-2", &script));
    println!("a pod on the other node found it in {:?}", start.elapsed());
    assert!(found.contains(address.as_str().unwrap()), "{found}, not {address}");
    assert!(found.contains("rank-0.gang.default.svc.cluster.local"), "{found}");
}

fn objects_are_stored_in_s3(cluster: &Cluster) {
    let s3 = cluster.s3();
    let script = format!(
        "key='--fail-with-body -sS --aws-sigv4 aws:amz:us-east-1:s3 --user {}:{}'
         echo carried >/tmp/object
         curl $key --upload-file /tmp/object {url}
         curl $key {url}
         # A wrong key is refused.
         ! curl --fail -sS --aws-sigv4 aws:amz:us-east-1:s3 --user a:b {url}",
        s3.access_key,
        s3.secret_key,
        url = format_args!("{}/{}/object", s3.endpoint, s3.bucket),
    );
    let log = run(cluster, &pod("s3", "node-2", &script));
    assert!(log.contains("carried"), "{log}");
    // The test process reaches S3 too. Without a key, S3 itself refuses the request.
    let port = s3.local_endpoint.rsplit(':').next().unwrap().parse().unwrap();
    let answer = http_get(port);
    assert!(answer.contains("<Code>AccessDenied</Code>"), "{answer}");

    cluster.stop_s3();
    assert!(http_get(port).is_empty());
    let start = Instant::now();
    cluster.start_s3().unwrap();
    println!("S3 was back after {:?}", start.elapsed());
    let log = run(cluster, &pod("s3-again", "node-1", &script));
    assert!(log.contains("carried"), "{log}");
}

/// Returns the response of a port of 127.0.0.1 to an HTTP request.
fn http_get(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn ports_are_forwarded_and_exposed(cluster: &Cluster) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"from outside\n").unwrap();
    });
    let address = cluster.expose(port).unwrap();
    let (host, port) = address.rsplit_once(':').unwrap();
    let host = host.trim_matches(['[', ']']);
    let log = run(cluster, &pod("out", "node-1", &format!("cat </dev/tcp/{host}/{port}")));
    assert_eq!(log, "from outside\n");
    server.join().unwrap();

    // CoreDNS reports its readiness only inside the cluster's network.
    let local = cluster.forward(host, 8053).unwrap();
    assert!(http_get(local).contains("HTTP/1."), "port {local}");
}

fn gpus_are_allocated(cluster: &Cluster) {
    cluster.gpus(1, 4).unwrap();
    cluster.set_unhealthy_gpus(1, &["gpu-0", "gpu-2"]).unwrap();
    let gpu_pod = |name: &str, count: usize| {
        let mut pod = pod(name, "", "echo $NVIDIA_VISIBLE_DEVICES");
        pod["spec"]["containers"][0]["resources"] =
            json!({ "limits": { "nvidia.com/gpu": count } });
        pod
    };
    assert_eq!(run(cluster, &gpu_pod("two-gpus", 2)), "gpu-1,gpu-3\n");
    cluster.apply(&gpu_pod("three-gpus", 3).to_string()).unwrap();
    let what = "the pod for three GPUs is unschedulable";
    let waited = cluster.watch_until(what, &["pod", "three-gpus"], |pod| {
        let seen = pod["status"]["conditions"].to_string();
        if seen.contains("Insufficient nvidia.com/gpu") { Ok(()) } else { Err(seen) }
    });
    waited.unwrap();
    cluster.set_unhealthy_gpus(1, &[]).unwrap();
    wait_for_phase(cluster, "three-gpus", "Succeeded");
}

fn killed_node_restarts(cluster: &Cluster) {
    cluster.gpus(2, 1).unwrap();
    cluster.apply(&pod("victim", "node-2", "exec sleep 1000").to_string()).unwrap();
    wait_for_phase(cluster, "victim", "Running");
    let start = Instant::now();
    cluster.kill_node(2).unwrap();
    println!("killed the node in {:?}", start.elapsed());
    let waited = cluster.watch_until("the node is Unknown", &["node", "node-2"], |node| {
        let seen = node["status"]["conditions"].to_string();
        if seen.contains(r#""status":"Unknown""#) { Ok(()) } else { Err(seen) }
    });
    waited.unwrap();
    println!("the control plane detected it after {:?}", start.elapsed());
    let waited = cluster.watch_until("the pod is being evicted", &["pod", "victim"], |pod| {
        let deleted = pod["metadata"]["deletionTimestamp"].is_string();
        if deleted { Ok(()) } else { Err(pod["status"].to_string()) }
    });
    waited.unwrap();
    println!("its pod was evicted after {:?}", start.elapsed());

    let start = Instant::now();
    cluster.restart_node(2).unwrap();
    println!("the node was back after {:?}", start.elapsed());
    wait_until("the evicted pod is gone", || match cluster.get(&["pod", "victim"]) {
        Ok(pod) => Err(pod["status"].to_string()),
        Err(error) if error.to_string().contains("NotFound") => Ok(()),
        Err(error) => Err(error.to_string()),
    })
    .unwrap();
    assert_eq!(run(cluster, &pod("later", "node-2", "echo alive")), "alive\n");
    cluster.gpus(2, 1).unwrap();
}
