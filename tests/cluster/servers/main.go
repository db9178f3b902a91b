// Command kube is every server of the test cluster in one binary, and kubectl: one link instead of
// seven. It acts as the name it is called by; scripts/fetch-cluster makes a link for each.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "fake-gpu":
		if err := fakeGPU(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "fake-gpu:", err)
			os.Exit(1)
		}
		return
	}
	command := kubernetes(name)
	if command == nil {
		fmt.Fprintf(os.Stderr, "%s: call me etcd, fake-gpu, kubectl or a Kubernetes server\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}

// kubernetes makes the command of that name and no other: making one registers flags and feature
// gates for the whole process, and two servers name the same ones.
func kubernetes(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "kube-proxy":
		return kubeproxy.NewProxyCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	}
	return nil
}
